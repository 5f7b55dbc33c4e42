"""The sections of a recipe. The string under a field is its help; `hf_gpipe.recipe.section` says what else it has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field

from hf_gpipe.recipe.pipeline import PipelineConfig
from hf_gpipe.recipe.section import (
    MAY_CHANGE,
    Count,
    CountOrZero,
    Fraction,
    Key,
    Kinds,
    NotNegative,
    Positive,
    Text,
    keys_of,
    section,
)
from hf_gpipe.recipe.strict_yaml import write

LOCAL_KINDS = ("jsonl", "csv", "parquet", "parallel")
ROW_KINDS = (*LOCAL_KINDS, "hub")

CLDR = Kinds(("cldr",))
ROWS = Kinds(ROW_KINDS)
FIELDS = Kinds(("jsonl", "csv", "parquet", "hub"))
TEXT = Kinds(("text",))
PAIRS = Kinds((*CLDR.names, *ROWS.names))
READ = Kinds((*ROWS.names, *TEXT.names))
OF_THE_HUB = Kinds(("hub", *TEXT.names))


@section()
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


@section()
class DataSection:
    """The corpus. A key that its kind does not use is an error."""

    kind: Literal["cldr", "jsonl", "csv", "parquet", "parallel", "hub", "text"]
    """Where the data come from. cldr: dates, units, prices and names generated offline from Unicode CLDR. Pairs from
    local files: jsonl, one JSON object per line; csv, also with tabs; parquet; parallel, two text files with a
    translation on each line. hub: pairs of a data set of the Hugging Face Hub, or of a directory of the same form.
    These five are called rows below. text: documents for a decoder-only model, cut into blocks of
    `max_target_tokens`."""

    seed: int = 0
    """Seed of what is generated or drawn; the order of training rows is `training.seed`'s."""

    languages: Annotated[list[Text], PAIRS] = field(default_factory=list)
    """The languages beside English. cldr: as CLDR codes, largest first; rows: those to keep, empty: all there are.
    {language} in `path`, `target_path`, `subset` or a field stands for each of them."""

    num_languages: Annotated[Count | None, CLDR] = None
    """In place of `languages`: that many, those in which CLDR can say the most of `templates` first."""

    rank_seed: Annotated[int | None, CLDR] = None
    """The seed that shuffles which language gets which size; null: the sizes fall in the languages' own order."""

    validation_fraction: Fraction = 0.05
    """Share of the pairs kept for evaluation during training."""

    test_fraction: Fraction = 0.05
    """Share of the pairs kept for the evaluation at the end."""

    temperature: Annotated[float, Field(ge=1), PAIRS] = 1.0
    """T: a language with a share s of the training pairs is drawn in proportion to s ** (1 / T); 1: as often as its
    pairs, a larger T: small languages more often, large ones less."""

    target_tag: Annotated[bool, PAIRS] = False
    """Whether sources start with a tag such as <2de> that asks for the target language; always so
    with several, where one side is known to be English."""

    max_source_tokens: Annotated[int, Field(ge=2), PAIRS] = 128
    """Longest source, its special tokens included; a longer one is cut."""

    max_target_tokens: Annotated[int, Field(ge=2)] = 128
    """Longest target, its special tokens included; a longer one is cut. text: the tokens of a block."""

    templates: Annotated[list[Text], CLDR] = field(default_factory=list)
    """The kinds of phrases; empty: all."""

    direction: Annotated[Literal["to_english", "from_english", "both"] | None, PAIRS] = None
    """The direction of translation; rows: the sides are exchanged where it asks for that. null: to_english (cldr), or
    from `source_field` to `target_field` (rows)."""

    max_number: Annotated[Count, CLDR] = 999
    """The largest number in a measure, price or relative time."""

    examples_per_language: Annotated[Count, CLDR] = 2000
    """Pairs of the first language; of the n-th, this divided by n ** `power_law_exponent`."""

    min_examples_per_language: Annotated[Count, CLDR] = 100
    """The fewest pairs that the power law leaves a language."""

    power_law_exponent: Annotated[NotNegative, CLDR] = 0.0
    """How steeply the languages' sizes fall; 0: all are equal."""

    path: Annotated[Text | None, READ] = None
    """A file, a directory of them, or wildcards as data/*.jsonl.gz; jsonl, csv and lines of text may be
    gzipped. hub, text: the data set's id or directory. Required."""

    target_path: Annotated[Text | None, Kinds(("parallel",))] = None
    """As `path`, the target's files; required."""

    delimiter: Annotated[Annotated[str, Field(min_length=1, max_length=1)] | None, Kinds(("csv",))] = None
    """The sign between values; null: a tab in files called .tsv, where nothing is quoted, else a comma."""

    subset: Annotated[Text | list[Text] | dict[str, Any] | None, OF_THE_HUB] = None
    """The subset, as "{language}-en"; or several such names, of which the first that exists is used, as
    ["{language}-en", "en-{language}"]; or the name for each language, as {de: de-en, zh: en-zh}. null: there is one."""

    revision: Annotated[Text | None, OF_THE_HUB] = None
    """Branch, tag or commit; null: the main branch."""

    source_field: Annotated[Text, FIELDS] = "source"
    """The field that holds the source; translation.de is the field de inside translation."""

    target_field: Annotated[Text, FIELDS] = "target"
    """The field that holds the target."""

    language_field: Annotated[Text | None, FIELDS] = None
    """The field that holds the language; null: no field does."""

    english: Annotated[Literal["source", "target"] | None, ROWS] = None
    """The side that is English, which `direction` needs to know; null: the one whose field has no {language} in
    it where the other's has."""

    text_field: Annotated[Text, TEXT] = "text"
    """The field of a row that holds a document; of a .txt file, paragraphs are documents."""

    split_by: Annotated[Literal["source", "target"], ROWS] = "source"
    """Pairs that are equal on this side are never in two splits, where the data set has none of its own."""

    skip_empty: Annotated[bool | None, ROWS] = None
    """Whether those without text on one side are left out and counted; null: for parallel and hub only."""

    max_examples: Annotated[Count | None, READ] = None
    """How many pairs or documents to draw from all of them, before they are split; null: all."""

    max_held_out: Annotated[Count | None, ROWS] = None
    """The most pairs of a language kept in validation, and in test; null: all, 2000 of a stream."""

    streaming: Annotated[bool, ROWS] = False
    """Whether pairs are read while they are trained on, over and over, instead of all at once before."""

    counts: Annotated[dict[str, Any] | None, ROWS] = None
    """With `streaming`: the training pairs of each language, as {de: 4500000, yo: 10000}, where the data do not say;
    `temperature` draws by them."""

    shuffle_buffer: Annotated[Count, ROWS] = 1000
    """With `streaming`: rows of a language that are held in memory and shuffled at a time."""


@section()
class TokenizerSection:
    """The tokenizer: loaded, or trained on the corpus."""

    path: Text | None = None
    """Hub id or directory to load from; null: `model.path`'s, or one trained on the corpus where there is none."""

    vocab_size: Count = 8000
    """Tokens of a trained tokenizer, the special tokens and the 256 bytes included."""

    model: Literal["unigram", "bpe"] = "unigram"
    """SentencePiece's model of a trained tokenizer."""

    character_coverage: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the corpus's characters that get a token; the rest is spelt in bytes."""

    training_pairs: Count | None = None
    """Pairs or documents to train it on, drawn from those of the corpus; null: all, of a stream at most 100,000."""


@section()
class TrainingSection:
    """Optimization, logging and checkpoints; names mean what they mean in transformers.TrainingArguments."""

    output_dir: Annotated[Text, MAY_CHANGE]
    """Directory for the trained model, its checkpoints, the metrics and the resolved recipe."""

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of the initial weights, of dropout and of the order of rows; independent of the number of stages."""

    max_steps: Annotated[Count | None, MAY_CHANGE] = None
    """Updates to make; null: `num_train_epochs` decides."""

    num_train_epochs: Annotated[Positive, MAY_CHANGE] = 3.0
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
    """Where a step's loss or gradient is inf or NaN: update all the same, leave the step out, or fail."""

    max_grad_norm: NotNegative = 1.0
    """Largest global norm of the gradient, over all stages; a larger one is scaled down to it; 0: no clipping."""

    label_smoothing_factor: Fraction = 0.0
    """Share of the target's probability spread over the whole vocabulary."""

    logit_clipping: Positive | None = None
    """The loss sees no logit beyond this magnitude; evaluation and the saved model do not clip. null: no clipping."""

    logging_steps: Annotated[Count, MAY_CHANGE] = 10
    """Updates between two lines of metrics."""

    timeline_steps: Annotated[Count | None, MAY_CHANGE] = None
    """Updates between two whose actions are timed, to log how much of them was idle (`bubble`); null: none is timed."""

    eval_steps: Annotated[Count | None, MAY_CHANGE] = None
    """Updates between two evaluations of the validation loss; null: none during training."""

    save_steps: Annotated[Count | None, MAY_CHANGE] = 500
    """Updates between two checkpoints; null: none during training."""

    save_total_limit: Annotated[Count | None, MAY_CHANGE] = 2
    """Checkpoints kept, the newest ones; null: all."""

    stop_seconds: Annotated[Positive, MAY_CHANGE] = 30.0
    """How long after SIGTERM or SIGINT the training may take to end its step and save, before it ends without."""

    resume: Annotated[Literal["auto", "never"], MAY_CHANGE] = "auto"
    """auto: continue from the last complete checkpoint in `output_dir`, where there is one; never: begin anew, and
    delete the checkpoints that are there."""


@section()
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

    samples: Annotated[CountOrZero, PAIRS] = 5
    """Translations shown in the summary."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run."""

    model: ModelSection
    data: DataSection
    tokenizer: TokenizerSection = field(default_factory=TokenizerSection)
    pipeline: Annotated[PipelineConfig, MAY_CHANGE] = field(default_factory=PipelineConfig)
    training: TrainingSection
    evaluation: Annotated[EvaluationSection, MAY_CHANGE] = field(default_factory=EvaluationSection)

    def to_yaml(self) -> str:
        """The resolved recipe with the default of every key that its kind of data uses.

        `load_recipe` reads it back as an equal recipe.
        """
        values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        for (name, key), value in self.values().items():
            values[name][key] = value
        return write(values)

    def values(self) -> dict[tuple[str, str], Any]:
        """The value of every key that the recipe's kind of data uses."""
        return {
            (name, key.name): getattr(getattr(self, name), key.name)
            for name, key in all_keys()
            if key.is_used_by(self.data.kind)
        }


SECTIONS: dict[str, type] = get_type_hints(Recipe)
"""The class of each section."""


def all_keys() -> list[tuple[str, Key]]:
    """Every key with the name of its section, in the order of the fields."""
    return [(name, key) for name, cls in SECTIONS.items() for key in keys_of(cls).values()]


def may_change() -> set[tuple[str, str]]:
    """The keys that a resumed run may change."""
    hints = get_type_hints(Recipe, include_extras=True)
    whole = {name for name, hint in hints.items() if MAY_CHANGE in getattr(hint, "__metadata__", ())}
    return {(name, key.name) for name, key in all_keys() if key.may_change or name in whole}
