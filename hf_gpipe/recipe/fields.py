"""The sections of a recipe. The string under a field is its help; `hf_gpipe.recipe.section` explains the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import Field

from hf_gpipe.recipe.data import EMBEDDINGS, KTO, OF_TEXT, OF_TOKENS, PAIRS, PREFERENCES, PROMPTS, REWARDS, DataSection
from hf_gpipe.recipe.pipeline import PipelineConfig
from hf_gpipe.recipe.section import (
    MAY_CHANGE,
    Count,
    CountOrZero,
    Fraction,
    Key,
    NotNegative,
    Positive,
    Text,
    keys_of,
    section,
)
from hf_gpipe.recipe.strict_yaml import write


@section()
class ModelSection:
    """The transformers model to train, pretrained or new."""

    path: Text | None = None
    """Hub id or directory whose weights are loaded; null: a new model is initialised from `config`."""

    config: dict[str, Any] = field(default_factory=dict)
    """`model_type` (marian, llama, ...) and the fields of its transformers config; with `path`, fields to override."""

    transformer: Text | None = None
    """Size of a new t5, mt5 or umt5 model, such as T(6, 8192, 16): layers of the encoder and of the decoder, width of
    feed-forward layers, number of heads, whose width is 64 unless `config` has d_kv. null: `config` has the size."""

    depth_scaled_feed_forward: bool = False
    """Whether a new model scales the initial weights of the last projection of each feed-forward block by 1/L, where L
    is the number of layers of its stack."""

    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Data type of the weights, of the computation and of the tensors that stages exchange."""

    attn_implementation: Text | None = None
    """Attention implementation of transformers: eager, sdpa, flash_attention_2, ...; null: the model's default."""

    trust_remote_code: bool = False
    """Whether to run Python code that comes with the model at `path`. Only the command line can say so
    (model.trust_remote_code=true); true in a file is an error."""

    quantization: Literal["nf4", "fp4", "int8"] | None = None
    """The form to which the weights of linear layers are quantised while they are loaded: nf4 or fp4, 4 bits each, or
    int8. They are not trained: it needs `lora.r`, and the package bitsandbytes. null: they are as at `path`, where
    bitsandbytes may have quantised them already."""

    double_quantization: bool = False
    """With nf4 and fp4: whether the scales of the 4-bit blocks are quantised too, which saves 0.4 bits per weight."""


@section()
class LoraSection:
    """LoRA: small matrices beside linear layers are trained, and the weights of the model stay as they are."""

    r: Count | None = None
    """Rank of the matrices; null: no new ones. Without `path`, all weights are then trained. The keys are those of the
    package peft."""

    lora_alpha: Count = 16
    """The product of the matrices is multiplied by lora_alpha / r."""

    lora_dropout: Fraction = 0.0
    """Dropout of the input of the matrices."""

    target_modules: list[Text] = field(default_factory=list)
    """Names of linear layers and embeddings with such matrices, such as [q_proj, v_proj, embed_tokens]; empty: all
    linear layers of the blocks."""

    modules_to_save: list[Text] = field(default_factory=list)
    """Names of modules that are trained whole beside the matrices, such as [embed_tokens, lm_head]."""

    path: Text | None = None
    """A directory with saved adapters of the model at `model.path`, in peft's format, that are trained on. They bring
    the settings of all other keys of this section."""

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained, new or saved ones."""
        return self.r is not None or self.path is not None


LossType = Literal[
    "sigmoid",
    "robust",
    "hinge",
    "ipo",
    "sigmoid_norm",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "cpo",
    "simpo",
    "orpo",
]
LOSS_TYPES: tuple[str, ...] = get_args(LossType)
#: Of these the ones that need no reference, and those that read an option.
WITHOUT_REFERENCE = ("cpo", "simpo", "orpo")
LOSSES_THAT_READ = {
    "label_smoothing": ("sigmoid", "robust", "cpo", "simpo"),
    "simpo_gamma": ("simpo",),
    "cpo_alpha": ("cpo", "simpo"),
}


def unused_by_loss(options: Any) -> Iterator[tuple[str, Any, str]]:
    """The name and value of each option of preferences that its loss does not read, and the losses that do."""
    for name, users in LOSSES_THAT_READ.items():
        if (value := getattr(options, name)) != getattr(type(options), name) and options.loss_type not in users:
            yield name, value, " and ".join(users)


@section()
class PreferencesSection:
    """The loss of preferences (DPO and others), for that kind of data; keys as in TRL."""

    beta: Annotated[Positive, PREFERENCES] = 0.1
    """How far the model may go from the reference, the model before its training; larger: less far."""

    loss_type: Annotated[LossType, PREFERENCES] = "sigmoid"
    """Loss of a pair. sigmoid: DPO; robust, hinge, ipo, sigmoid_norm, nca_pair, bco_pair, sppo_hard, apo_zero and
    apo_down: its variants of these names. cpo, simpo and orpo need no reference."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), PREFERENCES] = 0.0
    """Probability that the two answers of a pair are exchanged, for sigmoid (conservative DPO), robust, cpo and
    simpo."""

    simpo_gamma: Annotated[NotNegative | None, PREFERENCES] = None
    """The margin that simpo wants between the two answers; null: 0.5."""

    cpo_alpha: Annotated[NotNegative | None, PREFERENCES] = None
    """Of cpo and simpo, the weight of the cross-entropy of the chosen answers; null: 1 for cpo and 0 for simpo."""

    reference_free: Annotated[bool, PREFERENCES] = False
    """Whether the reference is left out."""

    precompute_ref_log_probs: Annotated[bool, PREFERENCES] = False
    """Whether the reference's log-probabilities are computed once before the training, instead of in each step with the
    adapters turned off. Without `lora.r` they always are."""

    disable_dropout: Annotated[bool, PREFERENCES] = True
    """Whether the model has no dropout in training."""


KTOType = Literal["kto", "apo_zero_unpaired"]


@section()
class KTOSection:
    """The loss of answers that are wanted or not (KTO), for that kind of data; keys as in TRL's KTOConfig."""

    beta: Annotated[Positive, KTO] = 0.1
    """How far the model may go from the reference, the model before its training; larger: less far."""

    loss_type: Annotated[KTOType, KTO] = "kto"
    """kto: beside the mean log-ratio of the mini-batch's prompts with the answers of other prompts, which two more
    forwards give; apo_zero_unpaired: without it."""

    desirable_weight: Annotated[NotNegative, KTO] = 1.0
    """Factor of the loss of each answer that is wanted."""

    undesirable_weight: Annotated[NotNegative, KTO] = 1.0
    """Factor of the loss of each other answer."""

    precompute_ref_log_probs: Annotated[bool, KTO] = False
    """Whether the reference's log-probabilities are computed once before the training, instead of in each step with the
    adapters turned off. Without `lora.r` they always are."""

    disable_dropout: Annotated[bool, KTO] = True
    """Whether the model has no dropout in training."""


@section()
class RewardsSection:
    """The loss of rewards (Bradley-Terry), for that kind of data; keys as in TRL's RewardConfig."""

    center_rewards_coefficient: Annotated[NotNegative | None, REWARDS] = None
    """Factor of the square of the sum of a pair's rewards, which is added to the loss; null: 0."""

    disable_dropout: Annotated[bool, REWARDS] = True
    """Whether the model has no dropout in training."""


EmbeddingLossType = Literal["multiple_negatives", "triplet", "cosine"]
Pooling = Literal["mean", "cls", "lasttoken"]


@section()
class EmbeddingsSection:
    """The loss of embeddings, for that kind of data; names are those of sentence-transformers."""

    loss_type: Annotated[EmbeddingLossType, EMBEDDINGS] = "multiple_negatives"
    """multiple_negatives: the anchor's own text among those of all rows of the mini-batch (InfoNCE); triplet: the
    negative is further away than the positive; cosine: the cosine of two texts is their score."""

    pooling: Annotated[Pooling, EMBEDDINGS] = "mean"
    """How hidden states become an embedding: the mean of the tokens; cls: the first one, of encoders alone; lasttoken:
    the last one, for decoder-only models."""

    texts: Annotated[Count | None, EMBEDDINGS] = None
    """Texts of a row: 2, or more with negatives; null: 2, or 3 of triplet."""

    scale: Annotated[Positive, EMBEDDINGS] = 20.0
    """Of multiple_negatives, the factor of cosines: the inverse of a temperature."""

    margin: Annotated[Positive, EMBEDDINGS] = 5.0
    """Of triplet, by how much the negative shall be further away."""

    distance: Annotated[Literal["euclidean", "cosine"], EMBEDDINGS] = "euclidean"
    """Of triplet, the distance of two embeddings."""

    matryoshka_dims: Annotated[list[Count] | None, EMBEDDINGS] = None
    """Sizes to which embeddings can be cut, such as [768, 256, 64]: the loss is the sum over them; null: the whole."""

    matryoshka_weights: Annotated[list[Positive] | None, EMBEDDINGS] = None
    """Factors of the losses of these sizes; null: 1 each."""

    disable_dropout: Annotated[bool, EMBEDDINGS] = False
    """Whether the model has no dropout in training."""

    @property
    def num_texts(self) -> int:
        """Texts of a row."""
        return self.texts or (3 if self.loss_type == "triplet" else 2)


@section()
class GRPOSection:
    """Rewards of a model's own completions (GRPO), for data of prompts; keys as in TRL's GRPOConfig."""

    reward: Annotated[Literal["exact", "contains", "characters"], PROMPTS] = "exact"
    """Reward of a completion, from 0 to 1: exact, whether it is the row's `answer`; contains, whether the answer is in
    it; characters, the share of characters that are the answer's at the same place."""

    num_generations: Annotated[int, Field(ge=2), PROMPTS] = 8
    """Completions of each prompt in a step."""

    max_completion_length: Annotated[Count, PROMPTS] = 512
    """Tokens of a completion at most."""

    temperature: Annotated[Positive, PROMPTS] = 1.0
    """Of sampling; the loss divides the logits by it too."""

    beta: Annotated[NotNegative, PROMPTS] = 0.0
    """Weight of the divergence from the model without its new adapters; it needs `lora.r`."""

    num_iterations: Annotated[Count, PROMPTS] = 1
    """Updates from the same completions."""

    epsilon: Annotated[NotNegative, PROMPTS] = 0.2
    """How far below 1 the ratio of a token's probabilities counts, and above it unless `epsilon_high` says more."""

    epsilon_high: Annotated[NotNegative | None, PROMPTS] = None
    """How far above 1 it counts; null: `epsilon`."""

    loss_type: Annotated[Literal["grpo", "bnpo", "dr_grpo", "dapo"], PROMPTS] = "dapo"
    """How tokens are averaged. grpo: over each row, then over rows; dapo, bnpo: over all tokens of the step; dr_grpo:
    their sum by the longest completion."""

    scale_rewards: Annotated[Literal["group", "batch", "none"], PROMPTS] = "group"
    """By whose standard deviation advantages are divided."""

    disable_dropout: Annotated[bool, PROMPTS] = False
    """Whether the model has no dropout in training."""


@section()
class DistillationSection:
    """A teacher, whose probabilities of tokens the model learns; keys as in TRL's GKDConfig."""

    teacher: Annotated[Text | None, OF_TOKENS] = None
    """Hub id or directory of the teacher, a decoder-only model with the same vocabulary; null: there is none. It is in
    the same stages, in the type of its own checkpoint, and runs in forwards alone."""

    quantization: Annotated[Literal["nf4", "fp4", "int8"] | None, OF_TOKENS] = None
    """The form to which the teacher's weights are quantised while they are loaded, as `model.quantization`; null: they
    are as in its checkpoint."""

    top_k_file: Annotated[Text | None, OF_TOKENS] = None
    """File with the teacher's most likely tokens for all rows, in place of the teacher, which is then not loaded;
    `scripts/write_teacher.py` writes it. The other tokens count as one. null: the teacher runs beside the model."""

    beta: Annotated[float, Field(ge=0, le=1), OF_TOKENS] = 0.5
    """0: the divergence from the teacher, KL(teacher, model); 1: KL(model, teacher); between them the generalized
    divergence of Jensen and Shannon."""

    temperature: Annotated[Positive, OF_TOKENS] = 1.0
    """Number by which the logits of both are divided in the divergence."""

    cross_entropy_share: Annotated[float, Field(ge=0, le=1), OF_TOKENS] = 0.0
    """Share of the cross-entropy of the targets in the loss; the divergence has the rest."""


@section()
class TokenizerSection:
    """The tokenizer, loaded or trained on the corpus."""

    path: Text | None = None
    """Hub id or directory to load from; null: that of `model.path`, or, if it has none, one trained on the corpus."""

    vocab_size: Annotated[int, Field(ge=1, le=2_000_000)] = 8000
    """Vocabulary size of a trained tokenizer, including the special tokens and the 256 bytes."""

    model: Literal["unigram", "bpe"] = "unigram"
    """SentencePiece model type of a trained tokenizer."""

    character_coverage: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the corpus's characters that are covered by tokens; the others are encoded as bytes."""

    training_pairs: Count | None = None
    """Number of pairs or documents to train it on, sampled from the corpus; null: 250,000, or 100,000 of a stream."""


@section()
class TrainingSection:
    """Optimization, logging and checkpoints; names have their meaning in transformers.TrainingArguments."""

    output_dir: Annotated[Text, MAY_CHANGE]
    """Directory for the trained model, checkpoints, metrics and the resolved recipe."""

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of the initial weights, of dropout and of the order of examples; independent of the number of stages."""

    max_steps: Annotated[Count | None, MAY_CHANGE] = None
    """Number of optimizer steps; null: `num_train_epochs` decides."""

    num_train_epochs: Annotated[Positive, MAY_CHANGE] = 3.0
    """Number of passes over the training split, if `max_steps` is null."""

    batch_size: Count = 32
    """Examples per mini-batch, in training and in evaluation during it."""

    batch_tokens: Count | None = None
    """Approximate number of target tokens per training mini-batch, instead of `batch_size`; null: use `batch_size`."""

    gradient_accumulation_steps: Count = 1
    """Number of mini-batches whose gradients are accumulated before an update."""

    length_bucketing: Annotated[bool, OF_TEXT] = True
    """Whether examples of similar length share a mini-batch, and within it a micro-batch, which saves padding."""

    packing: bool = False
    """Whether the rows of a training mini-batch are packed: each micro-batch is one row of whole examples without
    padding, which do not see each other. Mini-batches, loss and gradients stay those of the rows. Models that cannot
    keep examples apart are not supported."""

    learning_rate: NotNegative = 5e-5
    """Peak learning rate."""

    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "warmup_stable_decay",
    ] = "linear"
    """Schedule of the learning rate after the warm-up. warmup_stable_decay: constant, and at the end it falls over
    `decay_steps`."""

    decay_steps: Annotated[CountOrZero, MAY_CHANGE] = 0
    """With warmup_stable_decay: number of optimizer steps at the end over which the learning rate falls to 0, by a
    cosine."""

    warmup_steps: NotNegative = 0.0
    """Number of optimizer steps over which the learning rate rises from 0; a value below 1 is a share of all steps."""

    optim: Literal["adamw_torch_fused", "adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop"] = "adamw_torch_fused"
    """The optimizer."""

    weight_decay: NotNegative = 0.0
    """Weight decay of all parameters except biases and norms; AdamW and Adafactor decouple it from the gradient."""

    adam_beta1: Fraction = 0.9
    """Decay of Adam's first moment."""

    adam_beta2: Fraction = 0.999
    """Decay of Adam's second moment."""

    adam_epsilon: NotNegative = 1e-8
    """Epsilon in the denominator of Adam's update."""

    bf16: bool = False
    """Whether forwards run under autocast in bfloat16; weights and gradients keep `model.dtype`."""

    fp16: bool = False
    """Whether forwards run under autocast in float16, with one loss scale for all stages; needs float32 weights."""

    fp32_master_weights: bool = False
    """Whether the optimizer updates float32 copies of bfloat16 or float16 weights."""

    offload_optimizer: Annotated[bool, MAY_CHANGE] = False
    """Whether the optimizer's state is in CPU memory, where copies of the weights are updated: for GPUs that have too
    little for it. A step then waits for the host, and for gradients and weights on their way."""

    on_nonfinite_loss: Annotated[Literal["ignore", "skip", "stop"], MAY_CHANGE] = "ignore"
    """Action if a step's loss or gradient is inf or NaN. ignore: update anyway, as transformers' Trainer does; skip: no
    update, on all stages; stop: fail."""

    max_grad_norm: NotNegative = 1.0
    """Maximum norm of the gradient over all stages; a larger gradient is scaled down to it; 0: no clipping."""

    label_smoothing_factor: Fraction = 0.0
    """Share of the target's probability that is spread over the whole vocabulary."""

    logit_clipping: Positive | None = None
    """Magnitude to which logits are clipped in the training loss, but not in evaluation or in the saved model; null: no
    clipping."""

    logging_steps: Annotated[Count, MAY_CHANGE] = 10
    """Number of optimizer steps between two lines of metrics."""

    timeline_steps: Annotated[Count | None, MAY_CHANGE] = 10
    """With several processes, number of optimizer steps between two that are timed to log their idle share (`bubble`);
    null: none is timed."""

    slow_machine_steps: Annotated[Count | None, MAY_CHANGE] = 100
    """On several machines, the number of optimizer steps between two comparisons of how long each of them computes, so
    that a slow one is named; ten of these steps are timed. null: none is compared."""

    report_to: Annotated[list[Text], MAY_CHANGE] = field(default_factory=list)
    """Services that get the metrics besides the console and metrics.jsonl, such as [tensorboard], [wandb] or [mlflow],
    by transformers' names."""

    run_name: Annotated[Text | None, MAY_CHANGE] = None
    """Name of the run in these services; null: theirs."""

    push_to_hub: Annotated[bool, MAY_CHANGE] = False
    """Whether the trained model, and each checkpoint's, is uploaded to the Hugging Face Hub."""

    hub_model_id: Annotated[Text | None, MAY_CHANGE] = None
    """Repository of the upload, such as me/model, which is made if it does not exist; null: named like `output_dir`."""

    hub_private_repo: Annotated[bool | None, MAY_CHANGE] = None
    """Whether a repository that is made is private; null: the account's default."""

    eval_steps: Annotated[Count | None, MAY_CHANGE] = None
    """Number of optimizer steps between two evaluations of the validation loss; null: none during training."""

    save_steps: Annotated[Count | None, MAY_CHANGE] = 500
    """Number of optimizer steps between two checkpoints; null: none during training."""

    memory_save_steps: Annotated[Count | None, MAY_CHANGE] = None
    """Number of optimizer steps between two checkpoints that the machines keep in their memory (/dev/shm), for a start
    after a fault: each has the files of its own stages, and those of the machine before it. null: none."""

    save_total_limit: Annotated[Count | None, MAY_CHANGE] = 2
    """Number of checkpoints to keep, the newest ones; null: all."""

    load_best_model_at_end: Annotated[bool, MAY_CHANGE] = False
    """Whether the trained model is that of the checkpoint with the least validation loss, not the last one; as many
    steps must lie between two checkpoints as between two evaluations."""

    save_in_background: Annotated[Literal["auto", "always", "never"], MAY_CHANGE] = "auto"
    """Whether a checkpoint is copied to CPU memory and written while training goes on. auto: where the copies take at
    most half of the memory that is available."""

    stop_seconds: Annotated[Positive, MAY_CHANGE] = 30.0
    """Seconds that training has after SIGTERM or SIGINT to end its step and save; after that it ends without saving."""

    resume: Annotated[Literal["auto", "never"], MAY_CHANGE] = "auto"
    """auto: resume from the last complete checkpoint in `output_dir`, if there is one; never: start from scratch and
    delete the checkpoints in it."""


@section()
class EvaluationSection:
    """Evaluation after training: scores of translations, loss of text, accuracy on preferences."""

    max_examples: Count | None = None
    """Number of pairs per language, of blocks of text or of conversations to evaluate; null: the whole split."""

    batch_size: Count = 64
    """Number of examples to translate or evaluate at a time."""

    max_new_tokens: Count = 64
    """Maximum length of a translation, in tokens."""

    num_beams: Annotated[Count, PAIRS] = 1
    """Number of beams of the search for a translation; 1: greedy."""

    split: Literal["test", "validation"] = "test"
    """Split to evaluate."""

    samples: Annotated[CountOrZero, PAIRS] = 5
    """Number of translations shown in the summary."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run."""

    model: ModelSection
    lora: LoraSection = field(default_factory=LoraSection)
    preferences: PreferencesSection = field(default_factory=PreferencesSection)
    kto: KTOSection = field(default_factory=KTOSection)
    rewards: RewardsSection = field(default_factory=RewardsSection)
    embeddings: EmbeddingsSection = field(default_factory=EmbeddingsSection)
    grpo: GRPOSection = field(default_factory=GRPOSection)
    distillation: DistillationSection = field(default_factory=DistillationSection)
    data: DataSection
    tokenizer: TokenizerSection = field(default_factory=TokenizerSection)
    pipeline: Annotated[PipelineConfig, MAY_CHANGE] = field(default_factory=PipelineConfig)
    training: TrainingSection
    evaluation: Annotated[EvaluationSection, MAY_CHANGE] = field(default_factory=EvaluationSection)

    def to_yaml(self) -> str:
        """The resolved recipe as YAML, with the defaults of the keys that its kind of data uses.

        `load_recipe` reads it back as an equal recipe.
        """
        values: dict[str, dict[str, Any]] = {}
        for (name, key), value in self.values().items():
            values.setdefault(name, {})[key] = value
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
