"""The fields of a recipe. The string under each field is its help text."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from hf_gpipe.partition import COST_STRATEGIES, STRATEGIES
from hf_gpipe.recipe.strict_yaml import write
from hf_gpipe.recipe.typed import Length, NotEmpty, OneOf, Range
from hf_gpipe.schedule import SCHEDULES, TABLE_SUFFIX

TRAINING_SCHEDULES = tuple(name for name in SCHEDULES if name != "forward_only")
PARTITIONS = (*STRATEGIES, *COST_STRATEGIES, "auto")

Text = Annotated[str, NotEmpty()]
Count = Annotated[int, Range(at_least=1)]
CountOrZero = Annotated[int, Range(at_least=0)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(at_least=0)]
Fraction = Annotated[float, Range(at_least=0, below=1)]
"""A part of a whole that is never all of it."""


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The transformers model to train, pretrained or new."""

    path: Text | None = None
    """Hub id or directory whose weights are loaded; null: a new model is initialised from `config`."""

    config: dict[str, Any] = field(default_factory=dict)
    """`model_type` (marian, llama, ...) and the fields of its transformers config; with `path`, fields to override."""

    transformer: Text | None = None
    """Size of a new t5, mt5 or umt5 model, as T(6, 8192, 16): encoder and decoder layers, feed-forward width, heads,
    each 64 wide unless `config` gives d_kv. null: `config` says it all."""

    depth_scaled_feed_forward: bool = False
    """Whether the last projection of each feed-forward block of a new model starts 1/L times as large, L being the
    layers of its stack."""

    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """The type of the weights, of the arithmetic and of what crosses stage boundaries."""

    attn_implementation: Text | None = None
    """transformers' attention: eager, sdpa, flash_attention_2, ...; null: the model's own choice."""

    trust_remote_code: bool = False
    """Whether Python code that comes with the model at `path` may run on this machine."""


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The corpus. Keys that only other kinds read may stand; they are left aside."""

    kind: Literal["cldr", "jsonl", "csv", "parquet", "parallel", "hub", "text"]
    """cldr: dates, units, prices and names generated offline from Unicode CLDR. Pairs from local files: jsonl, one JSON
    object a line; csv, also with tabs; parquet; parallel, two text files with a translation on each line. hub: pairs of
    a data set of the Hugging Face Hub, or of a directory of the same form. These five are called rows below.
    text: documents for a decoder-only model, cut into blocks of `max_target_tokens`."""

    seed: int = 0
    """Seed of what is generated or drawn; the order of training rows is `training.seed`'s."""

    languages: list[Text] = field(default_factory=list)
    """The languages beside English: cldr: as CLDR codes, largest first; rows: those to keep, empty: all there are.
    {language} in `path`, `target_path`, `subset` or a field stands for each of them."""

    num_languages: Count | None = None
    """cldr: in place of `languages`: that many, those that CLDR can say the most of `templates` in first."""

    rank_seed: int | None = None
    """cldr: deals the ranks of the power law out to the languages; null: in their own order."""

    validation_fraction: Fraction = 0.05
    """Share of the pairs kept for evaluation during training."""

    test_fraction: Fraction = 0.05
    """Share of the pairs kept for the evaluation at the end."""

    temperature: Annotated[float, Range(at_least=1)] = 1.0
    """T: a language with a share s of the training pairs is drawn in proportion to s ** (1 / T); 1: as often as its
    pairs, a larger T: small languages more often, large ones less."""

    target_tag: bool = False
    """Whether sources start with a tag such as <2de> that asks for the target language; always so
    with several, where one side is known to be English."""

    max_source_tokens: Annotated[int, Range(at_least=2)] = 128
    """Longest source, its special tokens included; a longer one is cut."""

    max_target_tokens: Annotated[int, Range(at_least=2)] = 128
    """Longest target, its special tokens included; a longer one is cut. text: the tokens of a block."""

    templates: list[Text] = field(default_factory=list)
    """cldr: the kinds of phrases; empty: all."""

    direction: Literal["to_english", "from_english", "both"] | None = None
    """The direction of translation; rows: the sides are exchanged where it asks for that. null: to_english (cldr), or
    from `source_field` to `target_field` (rows)."""

    max_number: Count = 999
    """cldr: the largest number in a measure, price or relative time."""

    examples_per_language: Count = 2000
    """cldr: pairs of the first language; of the n-th, this divided by n ** `power_law_exponent`."""

    min_examples_per_language: Count = 100
    """cldr: the fewest pairs that the power law leaves a language."""

    power_law_exponent: NotNegative = 0.0
    """cldr: how steeply the languages' sizes fall; 0: all are equal."""

    path: Text | None = None
    """All but cldr: a file, a directory of them, or wildcards as data/*.jsonl.gz; jsonl, csv and lines of text may be
    gzipped. hub, text: the data set's id or directory. Required."""

    target_path: Text | None = None
    """parallel: the same of the target's files; required."""

    delimiter: Annotated[str, Length(1)] | None = None
    """csv: the sign between values; null: a tab in files called .tsv, where nothing is quoted, else a comma."""

    subset: Text | list[Text] | dict[str, Any] | None = None
    """hub, text: the subset, as "{language}-en"; or several such names, of which the first that there is is taken, as
    ["{language}-en", "en-{language}"]; or the name for each language, as {de: de-en, zh: en-zh}. null: there is one."""

    revision: Text | None = None
    """hub, text: branch, tag or commit; null: the main branch."""

    source_field: Text = "source"
    """jsonl, csv, parquet, hub: the field that holds the source; translation.de is the field de inside translation."""

    target_field: Text = "target"
    """jsonl, csv, parquet, hub: the field that holds the target."""

    language_field: Text | None = None
    """jsonl, csv, parquet, hub: the field that holds the language; null: no field does."""

    english: Literal["source", "target"] | None = None
    """rows: the side that is English, which `direction` needs to know; null: the one whose field has no {language} in
    it where the other's has."""

    text_field: Text = "text"
    """text: the field of a row that holds a document; of a .txt file, paragraphs are documents."""

    split_by: Literal["source", "target"] = "source"
    """rows: pairs that are equal on this side are never in two splits, where the data set has none of its own."""

    skip_empty: bool | None = None
    """rows: whether those without text on one side are left out and counted; null: for parallel and hub only."""

    max_examples: Count | None = None
    """rows, text: how many pairs or documents to draw from all of them, before they are split; null: all."""

    max_held_out: Count | None = None
    """rows: the most pairs of a language kept in validation, and in test; null: all, 2000 of a stream."""

    streaming: bool = False
    """rows: whether pairs are read while they are trained on, over and over, instead of all at once before."""

    counts: dict[str, Any] | None = None
    """streaming: how many training pairs each language has, as {de: 4500000, yo: 10000}, where the data do not say;
    `temperature` draws by them."""

    shuffle_buffer: Count = 1000
    """streaming: rows of a language that are held in memory and shuffled at a time."""


@dataclass(frozen=True, kw_only=True)
class TokenizerSection:
    """The tokenizer: loaded, or trained on the corpus."""

    path: Text | None = None
    """Hub id or directory to load from; null: `model.path`'s, or one trained on the corpus where there is none."""

    vocab_size: Count = 8000
    """Tokens of a trained tokenizer, the special tokens and the 256 bytes included."""

    model: Literal["unigram", "bpe"] = "unigram"
    """SentencePiece's model of a trained tokenizer."""

    character_coverage: Annotated[float, Range(above=0, at_most=1)] = 1.0
    """Share of the corpus's characters that get a token; the rest is spelt in bytes."""

    training_pairs: Count | None = None
    """Pairs or documents to train it on, drawn from those of the corpus; null: all, of a stream at most 100,000."""


@dataclass(frozen=True, kw_only=True)
class PipelineSection:
    """How the model is cut into stages, and how micro-batches go through them."""

    num_stages: Count = 1
    """K: consecutive stages the model's layers are cut into."""

    num_micro_batches: Count | Literal["auto"] = 1
    """M: micro-batches a mini-batch is cut into; a smaller mini-batch gives one a row; auto: the planner's choice."""

    schedule: Annotated[str, OneOf((*TRAINING_SCHEDULES, "auto"), TABLE_SUFFIX)] = "gpipe"
    """Order of work: gpipe, the paper's; gpipe_fused, its last stage's backwards at once; 1f1b, least memory;
    interleaved_1f1b, several stages a process, dealt out in turn; naive; or the file of a table of your own, as
    tables/mine.txt, which says with its R what is recomputed (python -m hf_gpipe.plan RECIPE --table writes one)."""

    recompute: Literal["none", "block", "stage", "auto"] = "stage"
    """What backward computes again instead of keeping: nothing, each block's inside, or all but the stage's input;
    auto: stage by stage as little as `memory` allows."""

    partition: Annotated[str, OneOf(PARTITIONS)] | list[Count] = "count"
    """count: stages of equally many layers, give or take one; parameters, flops, profile: the largest or slowest stage
    is the least, by size, by operations, or as measured before the training; auto: by the planner's estimate of time;
    or the number of layers of each stage, as [3, 4, 2]."""

    memory: Text | None = None
    """What a process may use, with its unit, as 80GiB: the planner's limit for what it chooses; null: its device's."""

    num_processes: Count | None = None
    """Processes that share the stages; null: one a stage, but at most one a GPU, or one for each of `devices`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where stages compute; auto: on GPUs where there are any."""

    devices: list[Text] | None = None
    """Devices of this machine that the processes share out evenly, as [cuda:0, cuda:1]; a process spreads its stages
    over its own. null: one device a process, of the kind that `device` says."""

    torch_compile: bool = False
    """Whether each block is compiled by torch.compile."""

    torch_compile_backend: Text | None = None
    """torch.compile's backend; null: its default, inductor."""

    timeout_seconds: Positive = 600.0
    """How long a process waits for another before the run fails."""

    threads_per_process: Count | None = None
    """CPU threads of each process; null: OMP_NUM_THREADS, or the machine's cores shared out evenly."""


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    """Optimization, logging and checkpoints; names mean what they mean in transformers.TrainingArguments."""

    output_dir: Text
    """Directory for the trained model, its checkpoints, the metrics and the resolved recipe."""

    seed: Annotated[int, Range(at_least=0, at_most=2**32 - 1)] = 0
    """Seed of the initial weights, of dropout and of the order of rows; independent of the number of stages."""

    max_steps: Count | None = None
    """Updates to make; null: `num_train_epochs` decides."""

    num_train_epochs: Positive = 3.0
    """Passes over the training pairs, where `max_steps` is null."""

    batch_size: Count = 32
    """Rows of a mini-batch: what one pass of the pipeline's schedule trains on, and evaluates."""

    batch_tokens: Count | None = None
    """Target tokens of a training mini-batch, about, in place of `batch_size`; null: `batch_size` rows."""

    gradient_accumulation_steps: Count = 1
    """Mini-batches whose gradients are added up before an update."""

    length_bucketing: bool = True
    """Whether rows of similar length share a mini-batch, and within it a micro-batch, which saves padding."""

    learning_rate: NotNegative = 5e-5
    """The highest learning rate."""

    lr_scheduler_type: Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
    ] = "linear"
    """How the learning rate goes on after the warm-up."""

    warmup_steps: NotNegative = 0.0
    """Updates over which the learning rate rises from 0; below 1: the share of all updates."""

    optim: Literal["adamw_torch_fused", "adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop"] = "adamw_torch_fused"
    """The optimizer."""

    weight_decay: NotNegative = 0.0
    """Weight decay of all parameters but biases and norms; decoupled from the gradient with AdamW and Adafactor."""

    adam_beta1: Fraction = 0.9
    """Decay of Adam's first moment."""

    adam_beta2: Fraction = 0.999
    """Decay of Adam's second moment."""

    adam_epsilon: NotNegative = 1e-8
    """Added to the denominator of Adam's update."""

    bf16: bool = False
    """Whether forwards compute in bfloat16 where that is safe (autocast); weights and gradients keep `model.dtype`."""

    fp16: bool = False
    """The same in float16, with a scale of the loss that all stages agree on; needs weights in float32."""

    fp32_master_weights: bool = False
    """Whether the optimizer updates float32 copies of weights that are in bfloat16 or float16."""

    on_nonfinite_loss: Literal["ignore", "skip", "stop"] = "stop"
    """Where a step's loss or gradient is infinite or no number: update all the same, leave the step out, or fail."""

    max_grad_norm: NotNegative = 1.0
    """Largest global norm of the gradient, over all stages; a larger one is scaled down to it; 0: no clipping."""

    label_smoothing_factor: Fraction = 0.0
    """Share of the target's probability spread over the whole vocabulary."""

    logit_clipping: Positive | None = None
    """The loss sees no logit beyond this magnitude; evaluation and the saved model do not clip. null: no clipping."""

    logging_steps: Count = 10
    """Updates between two lines of metrics."""

    timeline_steps: Count | None = None
    """Updates between two whose actions are timed, to log how much of them was idle (`bubble`); null: none is timed."""

    eval_steps: Count | None = None
    """Updates between two evaluations of the validation loss; null: none during training."""

    save_steps: Count | None = 500
    """Updates between two checkpoints; null: none during training."""

    save_total_limit: Count | None = 2
    """Checkpoints kept, the newest ones; null: all."""

    stop_seconds: Positive = 30.0
    """How long after SIGTERM or SIGINT the training may take to end its step and save, before it ends without."""

    resume: Literal["auto", "never"] = "auto"
    """auto: continue from the last complete checkpoint in `output_dir`, where there is one; never: begin anew, and
    delete the checkpoints that are there."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """After training: greedy translations, scored in each language; of text, loss and perplexity."""

    max_examples: Count | None = None
    """Pairs translated in each language, or blocks of text; null: all of the split."""

    batch_size: Count = 64
    """Rows translated or predicted at a time."""

    max_new_tokens: Count = 64
    """Longest translation, in tokens."""

    split: Literal["test", "validation"] = "test"
    """The pairs to translate."""

    samples: CountOrZero = 5
    """Translations shown in the summary."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run."""

    model: ModelSection
    data: DataSection
    tokenizer: TokenizerSection = field(default_factory=TokenizerSection)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    training: TrainingSection
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)

    def to_yaml(self) -> str:
        """The resolved recipe, every default written out; `load_recipe` reads it back as an equal recipe."""
        return write(asdict(self))
