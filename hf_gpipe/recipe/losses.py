"""The sections of a recipe that choose the loss: a teacher, and those of kinds of data with a loss of their own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hf_gpipe.recipe.data import PAIRS
from hf_gpipe.recipe.section import (
    Count,
    NotNegative,
    Positive,
    Text,
    keys_of,
    refuse_given,
    section,
)

#: The losses of preferences that need no reference, and those that read an option.
WITHOUT_REFERENCE = ("cpo", "simpo", "orpo")
_LOSSES_THAT_READ = {
    "label_smoothing": ("sigmoid", "robust", "cpo", "simpo"),
    "simpo_gamma": ("simpo",),
    "cpo_alpha": ("cpo", "simpo"),
}


@section()
class _AgainstReference:
    """The keys of losses that compare the model with a reference, the model before its training."""

    beta: Positive = 0.1
    """How far the model may go from the reference, the model before its training; larger: less far."""

    precompute_ref_log_probs: bool = False
    """Whether the reference's log-probabilities are computed once before the training, instead of in each step with the
    adapters turned off. Without `lora.r` they always are."""

    disable_dropout: bool = True
    """Whether the model has no dropout in training."""


@section(kinds=("preferences",))
class PreferencesSection(_AgainstReference):
    """The loss of preferences (DPO and others), for that kind of data; keys as in TRL."""

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
    """The margin that simpo wants between the two answers; null: 0.5."""

    cpo_alpha: NotNegative | None = None
    """Of cpo and simpo, the weight of the cross-entropy of the chosen answers; null: 1 for cpo and 0 for simpo."""

    reference_free: bool = False
    """Whether the reference is left out."""

    def __post_init__(self) -> None:
        for name, users in _LOSSES_THAT_READ.items():
            if self.loss_type not in users:
                why = f"loss_type is {self.loss_type}, which does not use it; choose {' or '.join(users)}"
                refuse_given(self, (name,), why)


@section(kinds=("kto",))
class KTOSection(_AgainstReference):
    """The loss of answers that are wanted or not (KTO), for that kind of data; keys as in TRL's KTOConfig."""

    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto: beside the mean log-ratio of the mini-batch's prompts with the answers of other prompts, which two more
    forwards give; apo_zero_unpaired: without it."""

    desirable_weight: NotNegative = 1.0
    """Factor of the loss of each answer that is wanted."""

    undesirable_weight: NotNegative = 1.0
    """Factor of the loss of each other answer."""


@section(kinds=("rewards",))
class RewardsSection:
    """The loss of rewards (Bradley-Terry), for that kind of data; keys as in TRL's RewardConfig."""

    center_rewards_coefficient: NotNegative | None = None
    """Factor of the square of the sum of a pair's rewards, which is added to the loss; null: 0."""

    disable_dropout: bool = True
    """Whether the model has no dropout in training."""


@section(kinds=("embeddings",))
class EmbeddingsSection:
    """The loss of embeddings, for that kind of data; names are those of sentence-transformers."""

    loss_type: Literal["multiple_negatives", "triplet", "cosine"] = "multiple_negatives"
    """multiple_negatives: the anchor's own text among those of all rows of the mini-batch (InfoNCE); triplet: the
    negative is further away than the positive; cosine: the cosine of two texts is their score."""

    pooling: Literal["mean", "cls", "lasttoken"] = "mean"
    """How hidden states become an embedding: the mean of the tokens; cls: the first one, of encoders alone; lasttoken:
    the last one, for decoder-only models."""

    texts: Count | None = None
    """Texts of a row: 2, or more with negatives; null: 2, or 3 of triplet."""

    scale: Positive = 20.0
    """Of multiple_negatives, the factor of cosines: the inverse of a temperature."""

    margin: Positive = 5.0
    """Of triplet, by how much the negative shall be further away."""

    distance: Literal["euclidean", "cosine"] = "euclidean"
    """Of triplet, the distance of two embeddings: euclidean or cosine."""

    matryoshka_dims: list[Count] | None = None
    """Sizes to which embeddings can be cut, such as [768, 256, 64]: the loss is the sum over them; null: the whole."""

    matryoshka_weights: list[Positive] | None = None
    """Factors of the losses of these sizes; null: 1 each."""

    disable_dropout: bool = False
    """Whether the model has no dropout in training."""

    @property
    def num_texts(self) -> int:
        """Texts of a row."""
        return self.texts or (3 if self.loss_type == "triplet" else 2)


@section(kinds=("prompts",))
class GRPOSection:
    """Rewards of a model's own completions (GRPO), for data of prompts; keys as in TRL's GRPOConfig."""

    reward: Literal["exact", "contains", "characters"] = "exact"
    """Reward of a completion, from 0 to 1: exact, whether it is the row's `answer`; contains, whether the answer is in
    it; characters, the share of characters that are the answer's at the same place."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    """Completions of each prompt in a step."""

    max_completion_length: Count = 512
    """Tokens of a completion at most."""

    temperature: Positive = 1.0
    """Of sampling; the loss divides the logits by it too."""

    beta: NotNegative = 0.0
    """Weight of the divergence from the model without its new adapters; it needs `lora.r`."""

    num_iterations: Count = 1
    """Updates from the same completions."""

    epsilon: NotNegative = 0.2
    """How far below 1 the ratio of a token's probabilities counts, and above it unless `epsilon_high` says more."""

    epsilon_high: NotNegative | None = None
    """How far above 1 it counts; null: `epsilon`."""

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dapo"
    """How tokens are averaged. grpo: over each row, then over rows; dapo, bnpo: over all tokens of the step; dr_grpo:
    their sum by the longest completion."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """By whose standard deviation advantages are divided: group, batch or none."""

    disable_dropout: bool = False
    """Whether the model has no dropout in training."""


@section(kinds=(*PAIRS, "text", "chat"))
class DistillationSection:
    """A teacher, whose probabilities of tokens the model learns; keys as in TRL's GKDConfig."""

    teacher: Text | None = None
    """Hub id or directory of the teacher, a decoder-only model with the same vocabulary; null: there is none. It is in
    the same stages, in the type of its own checkpoint, and runs in forwards alone."""

    quantization: Literal["nf4", "fp4", "int8"] | None = None
    """The form to which the teacher's weights are quantised while they are loaded, as `model.quantization`; null: they
    are as in its checkpoint."""

    top_k_file: Text | None = None
    """File with the teacher's most likely tokens for all rows, in place of the teacher, which is then not loaded;
    `scripts/write_teacher.py` writes it. The other tokens count as one. null: the teacher runs beside the model."""

    beta: Annotated[float, Field(ge=0, le=1)] = 0.5
    """0: the divergence from the teacher, KL(teacher, model); 1: KL(model, teacher); between them the generalized
    divergence of Jensen and Shannon."""

    temperature: Positive = 1.0
    """Number by which the logits of both are divided in the divergence."""

    cross_entropy_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the cross-entropy of the targets in the loss; the divergence has the rest."""

    def __post_init__(self) -> None:
        if self.teacher is None and self.top_k_file is None:
            refuse_given(self, keys_of(DistillationSection), "teacher is null; name a teacher")
