"""The sections of a recipe that choose the loss: a teacher, and those of kinds of data with a loss of their own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hf_gpipe.settings.kinds import PAIRS
from hf_gpipe.settings.section import (
    Count,
    NotNegative,
    Place,
    Positive,
    Settings,
    keys_of,
    refuse_given,
)

#: The losses of preferences that need no reference, and those that read an option.
WITHOUT_REFERENCE = ("cpo", "simpo", "orpo")
_LOSSES_THAT_READ = {
    "label_smoothing": ("sigmoid", "robust", "cpo", "simpo"),
    "simpo_gamma": ("simpo",),
    "cpo_alpha": ("cpo", "simpo"),
    "scale": ("multiple_negatives",),
    "margin": ("triplet",),
    "distance": ("triplet",),
}


def _check_read(section: Any) -> None:
    """Raise UserError for a key of a section that its `loss_type` does not read."""
    for name, users in _LOSSES_THAT_READ.items():
        if name in vars(section) and section.loss_type not in users:
            why = f"loss_type is {section.loss_type}, which does not use it; choose {' or '.join(users)}"
            refuse_given(section, (name,), why)


class _AgainstReference(Settings):
    """The keys of losses that compare the model with a reference, the model before its training."""

    beta: Positive = 0.1
    """How closely the model stays to the reference, which is the model before its training; larger: more closely."""

    precompute_ref_log_probs: bool = False
    """Whether the reference's log-probabilities are computed once before the training, instead of in each step with the
    adapters turned off. Without `lora.r` they are always computed before."""

    disable_dropout: bool = True
    """Whether the model has no dropout in training."""


class PreferencesSection(_AgainstReference):
    """Options of the loss for `data.kind: preferences` (DPO and others); keys as in TRL's DPOConfig."""

    kinds = ("preferences",)

    loss_type: Literal[
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
    ] = "sigmoid"
    """Loss of a pair. sigmoid: DPO; robust, hinge, ipo, sigmoid_norm, nca_pair, bco_pair, sppo_hard, apo_zero and
    apo_down: its variants of these names. cpo, simpo and orpo need no reference."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that the two answers of a pair are exchanged, for sigmoid (conservative DPO), robust, cpo and
    simpo."""

    simpo_gamma: NotNegative | None = None
    """simpo: the margin between the two answers; null: 0.5."""

    cpo_alpha: NotNegative | None = None
    """cpo and simpo: weight of the cross-entropy of the chosen answers; null: 1 for cpo and 0 for simpo."""

    reference_free: bool = False
    """Whether the loss leaves the reference out."""

    def model_post_init(self, context: Any, /) -> None:
        _check_read(self)
        if self.reference_free or self.loss_type in WITHOUT_REFERENCE:
            free = "reference_free is true" if self.reference_free else f"loss_type is {self.loss_type}"
            refuse_given(self, ("precompute_ref_log_probs",), f"{free}, so no reference is read; change that")


class KTOSection(_AgainstReference):
    """Options of the loss for `data.kind: kto`, answers that are wanted or not; keys as in TRL's KTOConfig."""

    kinds = ("kto",)

    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto: an answer is compared with the mean log-ratio of the mini-batch's prompts with the answers of other prompts,
    which needs two more forwards; apo_zero_unpaired: without this comparison."""

    desirable_weight: NotNegative = 1.0
    """Factor of the loss of a wanted answer."""

    undesirable_weight: NotNegative = 1.0
    """Factor of the loss of an answer that is not wanted."""


class RewardsSection(Settings):
    """Options of the loss for `data.kind: rewards` (Bradley-Terry); keys as in TRL's RewardConfig."""

    kinds = ("rewards",)

    center_rewards_coefficient: NotNegative | None = None
    """Factor of the square of the sum of a pair's rewards, which is added to the loss; null: 0."""

    disable_dropout: bool = True
    """Whether the model has no dropout in training."""


class EmbeddingsSection(Settings):
    """Options of the loss for `data.kind: embeddings`; names as in sentence-transformers."""

    kinds = ("embeddings",)

    loss_type: Literal["multiple_negatives", "triplet", "cosine"] = "multiple_negatives"
    """multiple_negatives: the model learns to find an anchor's own text among the texts of all rows of the mini-batch
    (InfoNCE); triplet: to place the negative further away than the positive; cosine: to give two texts their score as
    cosine."""

    pooling: Literal["auto", "mean", "cls", "lasttoken"] = "auto"
    """How hidden states become an embedding. mean: the mean of the tokens; cls: the first token, for encoders only;
    lasttoken: the last token, for decoder-only models; auto: as the model's files of sentence-transformers say, or
    mean."""

    texts: Count | None = None
    """Number of texts in a row: 2, or more with negatives; null: 2, and 3 for triplet."""

    scale: Positive = 20.0
    """multiple_negatives: factor of the cosines, the inverse of a temperature."""

    margin: Positive = 5.0
    """triplet: by how much the negative shall be further away than the positive."""

    distance: Literal["euclidean", "cosine"] = "euclidean"
    """triplet: how the distance of two embeddings is measured."""

    matryoshka_dims: list[Count] | None = None
    """Sizes to which embeddings can be cut, such as [768, 256, 64]: the loss is the sum over them; null: embeddings are
    not cut."""

    matryoshka_weights: list[Positive] | None = None
    """Factors of the losses of these sizes; null: 1 each."""

    disable_dropout: bool = False
    """Whether the model has no dropout in training."""

    def model_post_init(self, context: Any, /) -> None:
        _check_read(self)

    @property
    def num_texts(self) -> int:
        """Texts of a row."""
        return self.texts or (3 if self.loss_type == "triplet" else 2)


class GRPOSection(Settings):
    """Options for `data.kind: prompts` (GRPO): rewards of own completions; keys as in TRL's GRPOConfig."""

    kinds = ("prompts",)

    reward: Literal["exact", "contains", "characters"] = "exact"
    """Reward of a completion, from 0 to 1. exact: 1 if the completion is the row's `answer`; contains: 1 if the answer
    is in the completion; characters: the share of characters that equal the answer's at the same place."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    """Number of completions of each prompt in a step."""

    max_completion_length: Count = 512
    """Maximum number of tokens of a completion."""

    temperature: Positive = 1.0
    """Temperature at which completions are sampled; the loss also divides the logits by it."""

    beta: NotNegative = 0.0
    """Weight of the divergence from the model without its new adapters; a weight above 0 needs `lora.r`."""

    num_iterations: Count = 1
    """Number of updates from the same completions."""

    epsilon: NotNegative = 0.2
    """The ratio of a token's probabilities is clipped at 1 - epsilon and, without `epsilon_high`, at 1 + epsilon."""

    epsilon_high: NotNegative | None = None
    """The ratio is clipped at 1 + epsilon_high; null: `epsilon`."""

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dapo"
    """How tokens are averaged. grpo: over each row, then over rows; dapo, bnpo: over all tokens of the step; dr_grpo:
    the sum, divided by rows times `max_completion_length`."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """The rewards by whose standard deviation advantages are divided. group: of a prompt's completions; batch: of the
    whole mini-batch; none: advantages are not divided."""

    disable_dropout: bool = False
    """Whether the model has no dropout in training."""


class DistillationSection(Settings):
    """A teacher whose token probabilities the model learns; keys as in TRL's GKDConfig."""

    kinds = (*PAIRS, "text", "chat")

    teacher: Place | None = None
    """Hub id or directory of the teacher, a decoder-only model with the same vocabulary; null: no teacher. The teacher
    is cut into as many stages, keeps the data type of its checkpoint, and runs only forwards."""

    quantization: Literal["nf4", "fp4", "int8"] | None = None
    """The form to which the teacher's weights are quantised while they are loaded, as with `model.quantization`; null:
    as in its checkpoint."""

    beta: Annotated[float, Field(ge=0, le=1)] = 0.5
    """0: the divergence from the teacher, KL(teacher, model); 1: KL(model, teacher); between them the generalized
    divergence of Jensen and Shannon."""

    temperature: Positive = 1.0
    """Number by which the logits of both models are divided in the divergence."""

    cross_entropy_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the cross-entropy of the targets in the loss; the divergence has the rest."""

    def model_post_init(self, context: Any, /) -> None:
        if self.teacher is None:
            refuse_given(self, keys_of(DistillationSection), "teacher is null; name a teacher")
