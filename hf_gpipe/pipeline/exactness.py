"""Check whether a model is split exactly: compare a tiny clone of it in stages with the whole clone.

With eager attention, padding and two micro-batches, the loss and every gradient of the stages must be those of the
plain model looped over the same micro-batches: in float64 to 1e-10 of the global gradient norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from hf_gpipe.adapters import Blueprint, build_adapter, unsupported
from hf_gpipe.adapters.modules.kept_state import KeptState
from hf_gpipe.adapters.observation.structure import unlike_default
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.errors import StageError, UnsupportedModelError, listed, one_line
from hf_gpipe.model.clone import Batch, compared_once, exact_clone, narrowed, padded_batch
from hf_gpipe.model.reference import TOLERANCES, Step, next_tokens, plain_step
from hf_gpipe.pipeline.clone_steps import split_step
from hf_gpipe.pipeline.variant import Variant

#: `TOLERANCES` for float64 models that convert their logits to float32. The stages' loss, which is computed in place,
#: rounds in another way than torch's; with the same code for the loss they agree within 1e-16.
FLOAT32_LOGITS_TOLERANCE = 1e-6
#: The widths of further mini-batches, for clones whose modules keep a state or whose numbers depend on the length: a
#: wider and a narrower one than `LENGTH_LIMIT`.
NARROWER = (8, 6)
#: The tolerance between the plain model with and without the columns of padding that a stage cuts off: parts of some
#: models always compute in float32, and round in another way when shapes change.
TRIMMING_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Comparison:
    """The result of comparing a tiny clone in stages with the plain clone.

    Attributes:
        model_class: the class of the clones.
        differences: by number of stages, see `Step.difference`.
        num_gradients: number of parameters that had a gradient.
        dtype: type of the weights: float64, or float32 where the plain model's own code fails in float64.
        loss_dtype: type of the plain clone's logits, in which its loss is computed.
        padding_matters: whether the plain clone's numbers change where the adapter cuts columns of padding off.
    """

    model_class: str
    differences: Mapping[int, float]
    num_gradients: int
    dtype: torch.dtype
    loss_dtype: torch.dtype
    padding_matters: bool = False

    @property
    def difference(self) -> float:
        """The largest difference over the numbers of stages."""
        return max(self.differences.values())

    @property
    def is_exact(self) -> bool:
        return self.difference <= self.tolerance

    @property
    def tolerance(self) -> float:
        """The largest difference that rounding explains."""
        return TOLERANCES[self.dtype] if self.loss_dtype == self.dtype else FLOAT32_LOGITS_TOLERANCE

    def __str__(self) -> str:
        if self.difference == float("inf"):
            return "a tiny clone has gradients of other parameters than the plain model"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"a tiny clone differs by {self.difference:.0e} of the gradient norm from the plain model in {dtype}"


class CloneError(UnsupportedModelError):
    """No tiny clone of the plain model can be built and run, so its split cannot be checked."""


def verify(adapter: TextAdapter, variant: Variant) -> None:
    """Raise UnsupportedModelError unless a tiny clone of a model in stages is exact.

    Equal clones of listed families are compared once in a process.

    Args:
        adapter: the model's, which then keeps columns of padding if the clone's numbers depend on them.
        variant: how the clone is run. If its backward is split, one number of stages is tried, because the check
            without I and W has passed.
    """
    comparison = compared_once(adapter, str(variant), lambda: _verified(adapter, variant))
    if comparison.padding_matters:
        adapter.padding_matters_beyond = 0


def _verified(adapter: TextAdapter, variant: Variant) -> Comparison:
    """The comparison of an exact clone."""
    config, where = adapter.given_config, "in stages"
    num_stages: tuple[int | None, ...] = (variant.stages, None)
    if variant.splits_backward:
        where = "with a schedule that has I and W (1f1b has not)"
        num_stages = (variant.stages,)
    try:
        comparison = compare(
            config,
            num_stages,
            adapter.compared_class,
            trust_remote_code=adapter.blueprint.trust_remote_code,
            splits_backward=variant.splits_backward,
        )
    except UnsupportedModelError as error:
        reason = str(error).removeprefix(f"{config.model_type}: ")
        if odd := unlike_default(config):
            reason = f"with {listed(odd, 4)} unlike the family's default configuration, {reason}"
        raise unsupported(config, reason) from error
    if not comparison.is_exact:
        raise unsupported(config, f"{where} {comparison}")
    return comparison


def compare(
    config: PreTrainedConfig,
    num_stages: Sequence[int | None] = (3, None),
    model_class: type[PreTrainedModel] | None = None,
    *,
    trust_remote_code: bool = False,
    splits_backward: bool = False,
) -> Comparison:
    """Compare a tiny clone in stages with the plain clone.

    Args:
        config: the model's own configuration, of any size.
        num_stages: the numbers of stages to try, each at most the clone's number of layers; None: one stage per layer.
        model_class: class of the model; None: the one that transformers' auto classes choose.
        trust_remote_code: whether the configuration may name Python code outside of transformers.
        splits_backward: whether the stages compute the gradients of inputs and of weights apart (I and W).

    Raises:
        CloneError: the plain clone cannot be built or does not run.
        UnsupportedModelError: the model has not the form of a list of layers, its stages do not run, or its own loss is
            another one than that of the next token.
    """
    family, failure = config.model_type, Exception()
    for dtype in TOLERANCES:
        try:
            model = exact_clone(config, dtype, model_class, trust_remote_code=trust_remote_code)
            adapter = _adapter_or_reason(model, dtype)
            if isinstance(adapter, UnsupportedModelError):
                break
            batch = padded_batch(model)
            trims, adapter.padding_matters_beyond = adapter.padding_matters_beyond, 0
            untrimmed = plain_step(model, batch, adapter)
            if not math.isfinite(untrimmed.norm):
                # As of a softmax in float32, in which a float64 mask of all of a row's columns is infinite.
                raise ArithmeticError(f"its gradient norm is {untrimmed.norm}")
            break
        except Exception as error:
            failure = error
    else:
        what = f"{type(failure).__name__}: {one_line(str(failure), 200)}"
        raise CloneError(f"{family}: a tiny clone of the plain model fails: {what}") from failure
    if isinstance(adapter, UnsupportedModelError):
        raise adapter
    if untrimmed.norm == 0:
        raise CloneError(f"{family}: the plain model's gradient norm is {untrimmed.norm} on a tiny clone")
    expected, padding_matters = _trimmed(model, adapter, batch, untrimmed, trims)
    if adapter.has_head:
        new = KeptState(model)
        _check_own_loss(model, batch)
        new.restore()
    counts = [min(number or len(adapter.layers), len(adapter.layers)) for number in num_stages]
    runs = [(Variant(count, recompute), [batch]) for count, recompute in zip(counts, ("stage", "none"), strict=False)]
    if adapter.kept or adapter.padding_matters_beyond is not None:
        # The rows of a mini-batch share its width, so there are several.
        row = {name: tensor[:1] for name, tensor in padded_batch(model, with_images=False).items()}
        falling = [batch, *(narrowed(row, width) for width in NARROWER)]
        rising = falling[::-1]
        few, many = counts[0], counts[-1]
        runs = [(Variant(few), falling), (Variant(many, "none"), falling)]
        runs += [(Variant(few), rising), (Variant(few, "block"), rising)]
    differences, order = dict.fromkeys(counts, 0.0), None
    for variant, batches in runs:
        if len(batches) > 1 and batches is not order:  # in which the gradients are summed
            expected, order = plain_step(model, batches, adapter), batches
        try:
            step = split_step(model, adapter, batches, replace(variant, splits_backward=splits_backward))
        except StageError as error:
            raise UnsupportedModelError(
                f"{family}: a tiny clone in stages fails: {one_line(str(error), 200)}"
            ) from error
        assert variant.stages is not None
        differences[variant.stages] = max(differences[variant.stages], step.difference(expected))
    return Comparison(
        type(model).__name__, differences, len(expected.gradients), dtype, expected.dtype, padding_matters
    )


def _trimmed(
    model: PreTrainedModel, adapter: TextAdapter, batch: Batch, untrimmed: Step, trims: int | None
) -> tuple[Step, bool]:
    """The plain step without columns of padding, and whether these columns matter; the adapter then keeps them.

    Args:
        untrimmed: the step with the columns.
        trims: the adapter's `padding_matters_beyond`, for which the narrow mini-batch is compared too.
    """
    adapter.padding_matters_beyond = trims
    expected = plain_step(model, batch, adapter)
    pairs = [(untrimmed, expected)]
    if trims:
        rows = narrowed(padded_batch(model, with_images=False), trims)
        short = plain_step(model, rows, adapter)
        adapter.padding_matters_beyond = 0
        pairs.append((plain_step(model, rows, adapter), short))
        adapter.padding_matters_beyond = trims
    if any(whole.difference(cut) > TRIMMING_TOLERANCE for whole, cut in pairs):
        adapter.padding_matters_beyond = 0
        return untrimmed, True
    return expected, False


def _adapter_or_reason(model: PreTrainedModel, dtype: torch.dtype) -> TextAdapter | UnsupportedModelError:
    """The adapter of a clone, or why it has none; then the plain model has to run on text, or its error is raised."""
    try:
        return build_adapter(Blueprint(model.config, dtype, "eager", type(model)))
    except UnsupportedModelError as error:
        plain_step(model, padded_batch(model, with_images=False))
        return error


def _check_own_loss(model: PreTrainedModel, batch: Batch) -> None:
    """Raise UnsupportedModelError where the model's own loss is not the cross-entropy of the targets.

    A model that computes none from text alone is taken: its trainer has to be given one.
    """
    causal = not model.config.is_encoder_decoder
    with torch.no_grad():
        try:
            output = model(**batch, use_cache=False)
        except Exception:
            return
    if output.loss is None or getattr(output, "aux_loss", None) is not None:  # see `_check_coefficient`
        return
    targets = next_tokens(batch["labels"]) if causal else batch["labels"]
    ours = float(F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten()))
    if abs(float(output.loss) - ours) > 1e-3 * max(1.0, abs(ours)):
        raise UnsupportedModelError(
            f"{model.config.model_type}: the model's own loss is {float(output.loss):.4g} on a tiny clone, and the "
            f"cross-entropy of {'the next token' if causal else 'the labels'} is {ours:.4g}"
        )
