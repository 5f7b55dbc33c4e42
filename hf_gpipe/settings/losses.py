"""The options of losses, and the sections of a recipe that have them beside other keys of their tasks.

Settings of this package need no torch. The loss of a task has its `...Options`, and its trainer has an argument for
each key of the section.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from hf_gpipe.errors import UserError
from hf_gpipe.settings.kinds import PAIRS
from hf_gpipe.settings.mode import Listed
from hf_gpipe.settings.section import (
    OF_RECIPE,
    Count,
    NotNegative,
    Place,
    Positive,
    Settings,
    Text,
    keys_of,
    refuse_given,
)

#: The losses of preferences that need no reference.
WITHOUT_REFERENCE = ("cpo", "simpo", "orpo")
#: The losses of preferences that sort the pairs of a mini-batch.
SORTING = ("aot", "aot_unpaired")
#: The losses of preferences that read the difference of two rewards, or none. In the other losses of DPO a term of
#: other divergences would stay that depends on the prompt alone, and is not known.
_OF_MARGINS = ("sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "exo_pair", "discopop")
#: The losses of preferences of which each pair has its own; that of sft is a mean over tokens.
_OF_PAIRS = (*_OF_MARGINS, "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")


@dataclass(frozen=True)
class ReadBy:
    """Marks a key that is read with some values of `loss_type` alone; with another value it must not be given.

    Of several values one must be among `loss_types`, with `by_all` each.
    """

    loss_types: tuple[str, ...]
    by_all: bool = False


class LossOptions(Settings):
    """The options of a loss that has several types."""

    @property
    def loss_types(self) -> tuple[str, ...]:
        """The types whose sum the loss is; mostly one."""
        given = vars(self)["loss_type"]
        return (given,) if isinstance(given, str) else given

    def model_post_init(self, context: Any, /) -> None:
        for name, key in keys_of(type(self)).items():
            for mark in key.marks:
                if not isinstance(mark, ReadBy):
                    continue
                others = [chosen for chosen in self.loss_types if chosen not in mark.loss_types]
                if others and (mark.by_all or len(others) == len(self.loss_types)):
                    why = f"loss_type is {' and '.join(others)}, which does not use it; choose"
                    refuse_given(self, (name,), f"{why} {' or '.join(mark.loss_types)}")


class ReferenceOptions(LossOptions):
    """The options of losses that compare the model with a reference, the model before its training."""

    beta: Positive = 0.1
    """How closely the model stays to the reference, which is the model before its training; larger: more closely."""


class _Following(Settings):
    """The keys of trainers whose reference may follow the model."""

    sync_ref_model: bool = False
    """Whether the reference follows the model (TR-DPO). A copy of the trained weights is then kept in memory, which the
    planner does not count."""

    ref_model_mixup_alpha: Annotated[float, Field(gt=0, le=1)] = 0.6
    """sync_ref_model: by which share of the way the reference moves to the model."""

    ref_model_sync_steps: Count = 512
    """sync_ref_model: number of updates between two such moves."""

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        if not self.sync_ref_model:
            why = "sync_ref_model is false, so the reference stays; set that to true"
            refuse_given(self, ("ref_model_mixup_alpha", "ref_model_sync_steps"), why)


class _OfReference(_Following):
    """The keys of trainers of preferences."""

    precompute_ref_log_probs: bool = False
    """Whether the reference's log-probabilities are computed once before the training, instead of in each step with the
    adapters turned off. Without `lora.r` they are always computed before, unless the data is a stream or
    `sync_ref_model` is true."""

    disable_dropout: bool = True
    """Whether the model has no dropout in training."""

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        if self.sync_ref_model:
            why = "sync_ref_model is true, so the reference changes; choose one of them"
            refuse_given(self, ("precompute_ref_log_probs",), why)


PreferenceType = Literal[
    "sigmoid",
    "robust",
    "hinge",
    "ipo",
    "sigmoid_norm",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "cpo",
    "simpo",
    "orpo",
]
_Several = Annotated[tuple[PreferenceType, ...], Field(min_length=1)]
_Smoothed = ReadBy(("sigmoid", "robust", "exo_pair", *SORTING, "cpo", "simpo"))


def _one_of_one(value: Any) -> Any:
    """A list of names as a tuple, and of a single name that name."""
    if not isinstance(value, list | tuple):
        return value
    return value[0] if len(value) == 1 else tuple(value)


class PreferenceOptions(ReferenceOptions):
    """The options of the loss of pairs of answers."""

    loss_type: Annotated[PreferenceType | _Several, BeforeValidator(_one_of_one)] = "sigmoid"
    """Loss of a pair, or a list of several, whose sum is the loss. sigmoid: DPO; robust, hinge, ipo, sigmoid_norm,
    exo_pair, nca_pair, bco_pair, sppo_hard, apo_zero, apo_down and discopop: its variants of these names; aot and
    aot_unpaired: variants that sort the pairs of the mini-batch, which needs one more forward; sft: the cross-entropy
    of the chosen answer. cpo, simpo and orpo need no reference, and stand alone."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), _Smoothed] = 0.0
    """Probability that the two answers of a pair are exchanged, for sigmoid (conservative DPO), robust, exo_pair, aot,
    aot_unpaired, cpo and simpo."""

    reference_free: bool = False
    """Whether the loss leaves the reference out."""

    simpo_gamma: Annotated[NotNegative | None, ReadBy(("simpo",))] = None
    """simpo: the margin between the two answers; null: 0.5."""

    cpo_alpha: Annotated[NotNegative | None, ReadBy(("cpo", "simpo"))] = None
    """cpo and simpo: weight of the cross-entropy of the chosen answers; null: 1 for cpo and 0 for simpo."""

    loss_weights: Annotated[tuple[float, ...] | None, Listed] = None
    """Factors of the losses that `loss_type` lists; null: 1 each."""

    ld_alpha: Annotated[float | None, Field(ge=0, le=1), ReadBy((*_OF_PAIRS, *SORTING, "sft"), by_all=True)] = None
    """Weight of the tokens by which an answer is longer than the other one of its pair (LD-DPO); null: 1."""

    f_divergence_type: Annotated[
        Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"],
        ReadBy((*_OF_MARGINS, "sft"), by_all=True),
    ] = "reverse_kl"
    """The divergence from the reference that the rewards stand for (f-DPO)."""

    f_alpha_divergence_coef: float = 0.5
    """alpha_divergence: its alpha."""

    use_weighting: Annotated[bool, ReadBy(_OF_PAIRS, by_all=True)] = False
    """Whether the loss of a pair is multiplied by how likely the model finds both answers, per token (WPO). The logits
    are then made whole."""

    discopop_tau: Annotated[Positive, ReadBy(("discopop",))] = 0.05
    """discopop: the temperature at which the logistic and the exponential loss are mixed."""

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        names = self.loss_types
        if len(names) > 1 and (alone := [name for name in names if name in WITHOUT_REFERENCE]):
            raise UserError(f"loss_type is {', '.join(names)}, and {alone[0]} is a loss of its own; name it alone")
        if self.loss_weights is not None and len(self.loss_weights) != len(names):
            raise UserError(
                f"loss_weights has {len(self.loss_weights)} entries, and loss_type {len(names)}; give one for each"
            )
        if "exo_pair" in names and not self.label_smoothing:
            raise UserError(
                "label_smoothing is 0, and exo_pair reads its logarithm; set it to 0.001, as the paper does"
            )
        if self.f_divergence_type != "alpha_divergence":
            why = f"f_divergence_type is {self.f_divergence_type}, which has none; choose alpha_divergence"
            refuse_given(self, ("f_alpha_divergence_coef",), why)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the reference."""
        return not self.reference_free and self.loss_type not in WITHOUT_REFERENCE


class PreferencesSection(_OfReference, PreferenceOptions):
    """Options of the loss for `data.kind: preferences` (DPO and others); keys as in TRL's DPOConfig."""

    kinds = ("preferences",)

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        if not self.needs_reference:
            free = "reference_free is true" if self.reference_free else f"loss_type is {self.loss_type}"
            names = ("precompute_ref_log_probs", "sync_ref_model")
            refuse_given(self, names, f"{free}, so no reference is read; change that")


class KTOOptions(ReferenceOptions):
    """The options of the loss of single answers."""

    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto: an answer is compared with the mean log-ratio of the mini-batch's prompts with the answers of other prompts,
    which needs two more forwards; apo_zero_unpaired: without this comparison."""

    desirable_weight: NotNegative = 1.0
    """Factor of the loss of a wanted answer."""

    undesirable_weight: NotNegative = 1.0
    """Factor of the loss of an answer that is not wanted."""


class KTOSection(_OfReference, KTOOptions):
    """Options of the loss for `data.kind: kto`, answers that are wanted or not; keys as in TRL's KTOConfig."""

    kinds = ("kto",)


class RewardOptions(Settings):
    """The options of the loss of rewards."""

    center_rewards_coefficient: NotNegative | None = None
    """Factor of the square of the sum of a pair's rewards, which is added to the loss; null: 0."""


class RewardsSection(RewardOptions):
    """Options of the loss for `data.kind: rewards` (Bradley-Terry); keys as in TRL's RewardConfig."""

    kinds = ("rewards",)

    disable_dropout: bool = True
    """Whether the model has no dropout in training."""


class EmbeddingOptions(LossOptions):
    """The options of the loss of embeddings."""

    loss_type: Literal["multiple_negatives", "triplet", "cosine", "cosent"] = "multiple_negatives"
    """multiple_negatives: the model learns to find an anchor's own text among the texts of all rows of the mini-batch
    (InfoNCE); triplet: to place the negative further away than the positive; cosine: to give two texts their score as
    cosine; cosent: to give the two texts of a row with a higher score a higher cosine."""

    pooling: Literal["auto", "mean", "cls", "lasttoken"] = "auto"
    """How hidden states become an embedding. mean: the mean of the tokens; cls: the first token, for encoders only;
    lasttoken: the last token, for decoder-only models; auto: as the model's files of sentence-transformers say, or
    mean."""

    texts: Count | None = None
    """Number of texts in a row: 2, or more with negatives; null: 2, and 3 for triplet; for a trainer's
    multiple_negatives as many as the rows have."""

    scale: Annotated[Positive, ReadBy(("multiple_negatives", "cosent"))] = 20.0
    """multiple_negatives, cosent: factor of the cosines, the inverse of a temperature."""

    margin: Annotated[Positive, ReadBy(("triplet",))] = 5.0
    """triplet: by how much the negative shall be further away than the positive."""

    distance: Annotated[Literal["euclidean", "cosine"], ReadBy(("triplet",))] = "euclidean"
    """triplet: how the distance of two embeddings is measured."""

    matryoshka_dims: Annotated[tuple[Count, ...] | None, Listed] = None
    """Sizes to which embeddings can be cut, such as [768, 256, 64]: the loss is the sum over them; null: embeddings are
    not cut."""

    matryoshka_weights: Annotated[tuple[Positive, ...] | None, Listed] = None
    """Factors of the losses of these sizes; null: 1 each."""

    @property
    def num_texts(self) -> int:
        """Texts of a row."""
        return self.texts or (3 if self.loss_type == "triplet" else 2)


class EmbeddingsSection(EmbeddingOptions):
    """Options of the loss for `data.kind: embeddings`; names as in sentence-transformers."""

    kinds = ("embeddings",)

    batch_sampler: Literal["batch_sampler", "no_duplicates"] = "batch_sampler"
    """How the rows of a mini-batch are drawn. no_duplicates: no text is twice in a mini-batch, where multiple_negatives
    would take it for its own negative; a row whose texts are in all mini-batches is left out of the epoch."""

    prompts: dict[Text, str] | str | None = None
    """Words that go before the texts of each column, such as {anchor: "query: "}, or before all texts; null: none."""

    disable_dropout: bool = False
    """Whether the model has no dropout in training."""


#: The losses of completions that clip the ratio of probabilities on both sides.
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


class GRPOOptions(LossOptions):
    """The options of the loss of completions with advantages."""

    beta: NotNegative = 0.0
    """Weight of the divergence from the reference, which is the model before its training."""

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"] = "dapo"
    """The loss of a token, and how tokens are averaged. grpo, dapo, bnpo, dr_grpo and luspo clip the ratio of
    probabilities. grpo: the mean over each row, then over rows; dapo: over all tokens of the step; bnpo: over those of
    each mini-batch; dr_grpo: the sum, divided by rows times `max_completion_length`; luspo: the sum over each row, then
    the mean over rows. cispo and vespo weight log-probabilities and average as dapo does; sapo limits the ratio
    smoothly, and averages as grpo."""

    max_completion_length: Count = 512
    """Maximum number of tokens of a completion."""

    epsilon: Annotated[NotNegative, ReadBy((*CLIPPED, "cispo"))] = 0.2
    """The ratio of a token's probabilities is clipped at 1 - epsilon and, without `epsilon_high`, at 1 + epsilon."""

    epsilon_high: Annotated[NotNegative | None, ReadBy((*CLIPPED, "cispo"))] = None
    """The ratio is clipped at 1 + epsilon_high, of cispo at epsilon_high itself; null: `epsilon`."""

    temperature: Positive = 1.0
    """Temperature at which completions are sampled; the loss also divides the logits by it."""


class _Rollouts(Settings):
    """How completions are made and rewarded."""

    reward: Annotated[Literal["exact", "contains", "characters"], OF_RECIPE] = "exact"
    """Reward of a completion, from 0 to 1. exact: 1 if the completion is the row's `answer`; contains: 1 if the answer
    is in the completion; characters: the share of characters that equal the answer's at the same place."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    """Number of completions of each prompt in a step."""

    num_iterations: Count = 1
    """Number of updates from the same completions."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """The rewards by whose standard deviation advantages are divided. group: of a prompt's completions; batch: of the
    whole mini-batch; none: advantages are not divided."""

    disable_dropout: bool = False
    """Whether the model has no dropout in training."""


class GRPOSection(_Following, GRPOOptions, _Rollouts):
    """Options for `data.kind: prompts` (GRPO): rewards of own completions; keys as in TRL's GRPOConfig."""

    kinds = ("prompts",)


class DistillationOptions(Settings):
    """The options of the loss of a student beside its teacher."""

    beta: Annotated[float, Field(ge=0, le=1)] = 0.5
    """0: the divergence from the teacher, KL(teacher, model); 1: KL(model, teacher); between them the generalized
    divergence of Jensen and Shannon."""

    temperature: Positive = 1.0
    """Number by which the logits of both models are divided in the divergence."""

    cross_entropy_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the cross-entropy of the targets in the loss; the divergence has the rest."""


class _Teacher(Settings):
    """The teacher."""

    teacher: Place | None = None
    """Hub id or directory of the teacher, a decoder-only model with the same vocabulary; null: no teacher. The teacher
    is cut into as many stages, keeps the data type of its checkpoint, and runs only forwards."""

    quantization: Literal["nf4", "fp4", "int8"] | None = None
    """The form to which the teacher's weights are quantised while they are loaded, as with `model.quantization`; null:
    as in its checkpoint."""


class DistillationSection(DistillationOptions, _Teacher):
    """A teacher whose token probabilities the model learns; keys as in TRL's GKDConfig."""

    kinds = (*PAIRS, "text", "chat")
    #: Whose companion it is, and the task whose `loss_of` makes the loss.
    mode: ClassVar = "teacher"
    task: ClassVar = "distil"

    @property
    def companion(self) -> str | None:
        """The place of a model beside the trained one."""
        return self.teacher

    def model_post_init(self, context: Any, /) -> None:
        if self.teacher is None:
            refuse_given(self, keys_of(DistillationSection), "teacher is null; name a teacher")
