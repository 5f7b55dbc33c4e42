"""Check whether a model is split exactly: compare a tiny clone of it in stages with the whole clone.

With eager attention, padding and two micro-batches, the loss and every gradient of the stages must be those of the
plain model looped over the same micro-batches: in float64 to 1e-10 of the global gradient norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from hf_gpipe.adapters import IGNORED_LABEL, Adapter, StageModel, build_adapter, is_listed, unsupported
from hf_gpipe.adapters.image_text import FORMS, example_batch
from hf_gpipe.adapters.routers import auxiliary_loss
from hf_gpipe.adapters.skeleton import build
from hf_gpipe.adapters.structure import unlike_default
from hf_gpipe.adapters.tensor_parallel.ranks import Ranks
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.adapters.tiny import tiny_config
from hf_gpipe.errors import StageError, UnsupportedModelError, listed
from hf_gpipe.model.assembly import assemble
from hf_gpipe.partition import partition
from hf_gpipe.runtime.channel import LocalChannel
from hf_gpipe.runtime.edges import Edge
from hf_gpipe.runtime.executor import Executor, Row
from hf_gpipe.runtime.loss import PLAIN, Loss, LossInputs, Reads
from hf_gpipe.runtime.micro_batch import chunks_of, make_micro_batches, split_rows
from hf_gpipe.runtime.stage import Stage
from hf_gpipe.runtime.ties import share_within_process
from hf_gpipe.schedule.builders import build as build_schedule
from hf_gpipe.schedule.kinds import BACKWARD, INPUT, UPDATE, WEIGHT
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.table import Schedule

#: Largest difference between stages and plain model: of the global gradient norm, for the loss relative.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
#: The same for float64 models that convert their logits to float32. The stages' loss, which is computed in place,
#: rounds in another way than torch's; with the same code for the loss they agree within 1e-16.
FLOAT32_LOGITS_TOLERANCE = 1e-6
#: The same for the plain model with and without the columns of padding that a stage cuts off: parts of some models
#: always compute in float32, and round in another way when shapes change.
TRIMMING_TOLERANCE = 1e-5
ROWS, SOURCE_LENGTH, TARGET_LENGTH, MICRO_BATCHES = 4, 9, 7, 2

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """Loss and gradients of one step, by parameter name; `dtype` is the type in which the loss was computed."""

    loss: float
    gradients: dict[str, torch.Tensor]
    dtype: torch.dtype

    @property
    def norm(self) -> float:
        """The global gradient norm."""
        return float(torch.sqrt(sum((g.double().square().sum() for g in self.gradients.values()), torch.zeros(()))))

    def difference(self, other: Step) -> float:
        """The largest difference of the loss (relative) or of a gradient (of the global norm of `other`).

        It is inf unless the same parameters have a gradient.
        """
        if self.gradients.keys() != other.gradients.keys():
            return float("inf")
        norm = other.norm
        errors = [float((self.gradients[name] - g).norm()) / norm for name, g in other.gradients.items()]
        return max([abs(self.loss - other.loss) / max(1.0, abs(other.loss)), *errors])


@dataclass(frozen=True)
class Comparison:
    """The result of comparing a tiny clone in stages with the plain clone.

    Attributes:
        model_class: the class of the clones.
        differences: by number of stages, see `Step.difference`.
        num_gradients: number of parameters that had a gradient.
        dtype: type of the weights: float64, or float32 where the plain model's own code fails in float64.
        loss_dtype: type of the plain clone's logits, in which its loss is computed.
        padding_matters: whether the plain clone's numbers change where columns of padding are cut off.
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


def exact_clone(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    model_class: type[PreTrainedModel] | None = None,
    *,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build the tiny clone with random weights and without dropout, in training mode.

    Raises UnsupportedModelError if transformers cannot build it.
    """
    tiny = tiny_config(config)
    turn_randomness_off(tiny)
    tiny._experts_implementation = "eager"  # grouped matrix products do not support float64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = randomise(build(tiny, dtype, "eager", model_class, trust_remote_code=trust_remote_code))
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def randomise(model: PreTrainedModel) -> PreTrainedModel:
    """Add noise to the weights of a new model: among zeros and ones a missing bias or norm would not be noticed."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not name.endswith("embed_positions.weight"):
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.tie_weights()
    return model.train()


class CloneError(UnsupportedModelError):
    """No tiny clone of the plain model can be built and run, so its split cannot be checked."""


Result = TypeVar("Result")

#: Of clones that were compared in this process the result, or the error.
_compared: dict[str, Any] = {}


def verify(adapter: TextAdapter, *, splits_backward: bool = False) -> None:
    """Raise UnsupportedModelError unless a tiny clone of a model in stages is exact.

    Equal clones of listed families are compared once in a process.

    Args:
        adapter: the model's, which then keeps columns of padding if the clone's numbers depend on them.
        splits_backward: as of `compare`; one number of stages is tried, for a model of which the check without it has
            passed.
    """
    config, model_class, trust_remote_code = adapter.given_config, adapter.compared_class, adapter.trust_remote_code
    comparison = compared_once(
        adapter,
        f"in stages {splits_backward}",
        lambda: _verify(config, model_class, trust_remote_code, splits_backward),
    )
    adapter.padding_matters |= comparison.padding_matters


def compared_once(adapter: TextAdapter, what: str, compare: Callable[[], Result]) -> Result:
    """The result of a comparison, which is made once in a process for equal clones of listed families.

    Args:
        adapter: the model's.
        what: names the comparison and its options.
        compare: makes it.

    Raises:
        UnsupportedModelError: the comparison raises it.
    """
    config = adapter.given_config
    tiny = tiny_config(config).to_json_string(use_diff=False)
    identity = f"{what} {adapter.compared_class} {type(config).__qualname__} {adapter.trust_remote_code} {tiny}"
    result = _compared.get(identity)
    if result is None:
        try:
            result = compare()
        except UnsupportedModelError as error:
            result = error
        if is_listed(config):
            _compared[identity] = result
    if isinstance(result, UnsupportedModelError):
        raise result
    return cast(Result, result)


def clone_of(adapter: TextAdapter, dtype: torch.dtype) -> tuple[PreTrainedModel, TextAdapter]:
    """A tiny clone of an adapter's model in training mode, and its adapter, with the attention that the model has."""
    options = {"trust_remote_code": adapter.trust_remote_code}
    model = exact_clone(adapter.given_config, dtype, adapter.model_class, **options)
    model.set_attn_implementation(attention_of(adapter))
    return model, build_adapter(model.config, dtype, attention_of(adapter), type(model))


def attention_of(adapter: TextAdapter) -> str:
    """The attention of a model's clone: that of the model where a CPU has it, else eager."""
    return "sdpa" if adapter.reference.config._attn_implementation == "sdpa" else "eager"


def _verify(
    config: PreTrainedConfig,
    model_class: type[PreTrainedModel] | None,
    trust_remote_code: bool,
    splits_backward: bool,
) -> Comparison:
    where = "in stages"
    num_stages: tuple[int | None, ...] = (3, None)
    if splits_backward:
        where = "with a schedule that has I and W (1f1b has not)"
        num_stages = (3,)
    try:
        comparison = compare(
            config, num_stages, model_class, trust_remote_code=trust_remote_code, splits_backward=splits_backward
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
            batch = padded_batch(model)
            adapter = build_adapter(model.config, dtype, "eager", type(model))
            is_known, adapter.padding_matters = adapter.padding_matters, True
            untrimmed = plain_step(model, batch, adapter)
            break
        except Exception as error:
            failure = error
    else:
        what = f"{type(failure).__name__}: {first_line(failure)}"
        raise CloneError(f"{family}: a tiny clone of the plain model fails: {what}") from failure
    adapter.padding_matters = is_known
    expected = plain_step(model, batch, adapter)
    if not 0 < expected.norm < float("inf"):
        raise CloneError(f"{family}: the plain model's gradient norm is {expected.norm} on a tiny clone")
    if untrimmed.difference(expected) > TRIMMING_TOLERANCE:
        adapter.padding_matters, expected = True, untrimmed
    if adapter.has_head:
        _check_own_loss(model, batch)
    differences = {}
    for number in num_stages:
        count = min(number or len(adapter.layers), len(adapter.layers))
        model.zero_grad()
        try:
            found = split_step(model, adapter, batch, count, splits_backward=splits_backward)
        except StageError as error:
            raise UnsupportedModelError(f"{family}: a tiny clone in stages fails: {first_line(error)}") from error
        differences[count] = found.difference(expected)
    return Comparison(
        type(model).__name__, differences, len(expected.gradients), dtype, expected.dtype, adapter.padding_matters
    )


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
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL) if causal else batch["labels"]
    ours = float(F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten()))
    if abs(float(output.loss) - ours) > 1e-3 * max(1.0, abs(ours)):
        raise UnsupportedModelError(
            f"{model.config.model_type}: the model's own loss is {float(output.loss):.4g} on a tiny clone, and the "
            f"cross-entropy of {'the next token' if causal else 'the labels'} is {ours:.4g}"
        )


def first_line(error: Exception) -> str:
    """The message of an error as one line of at most 200 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:197]}..."


def padded_batch(model: PreTrainedModel, *, with_images: bool = True) -> Batch:
    """Return a mini-batch with rows of unequal length, padded on the right.

    Args:
        model: the model.
        with_images: whether rows have images, if it reads any.
    """
    if with_images and model.config.model_type in FORMS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            # Several images in a row, a row without one beside it, and a micro-batch without any.
            return example_batch(model, [2, 0, *[0] * (ROWS - 2)])
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(1)
    vocabulary = min(config.vocab_size, model.get_input_embeddings().weight.shape[0])
    ids = torch.randint(3, vocabulary, (ROWS, SOURCE_LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    labels = torch.randint(3, vocabulary, (ROWS, TARGET_LENGTH), generator=generator)
    for row in range(ROWS):
        mask[row, SOURCE_LENGTH - row :] = 0
        labels[row, TARGET_LENGTH - row :] = IGNORED_LABEL
    ids = ids.masked_fill(mask == 0, config.pad_token_id if isinstance(config.pad_token_id, int) else 0)
    if not model.config.is_encoder_decoder:
        labels = ids.masked_fill(mask == 0, IGNORED_LABEL)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class _OfHidden(Loss):
    """Compares models without a head: of each row a sum over its tokens that reads every hidden state."""

    reads = Reads.HIDDEN

    @staticmethod
    def of_rows(hidden: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of each row, (B,), from (B, T, D)."""
        weights = torch.arange(1, 1 + hidden.shape[-1]).to(hidden).sin()
        return ((hidden * weights).sin().sum(dim=2) * inputs["attention_mask"]).sum(dim=1)

    def of_units(self, read: LossInputs) -> torch.Tensor:
        return self.of_rows(read.hidden, read.inputs)


def plain_step(model: PreTrainedModel, batch: Batch, adapter: Adapter | None = None) -> Step:
    """`plain_run` on the micro-batches of a mini-batch.

    Args:
        model: the whole model.
        batch: the mini-batch.
        adapter: cuts it, and prepares a micro-batch; None: it is cut by rows, and taken as it is.
    """
    if adapter is None:
        return plain_run(model, split_rows(batch, MICRO_BATCHES))
    parts = split_rows(batch, MICRO_BATCHES, lengths=adapter.lengths_in_rows(batch))
    return plain_run(model, [adapter.prepare(rows) for rows in parts])


def plain_run(model: PreTrainedModel, micro_batches: Sequence[Batch], label_smoothing: float = 0.0) -> Step:
    """Run the plain model on each micro-batch; the loss is summed over target tokens, divided by their number in all.

    An auxiliary loss of experts is the mean over the micro-batches.
    """
    model.zero_grad()
    causal = not model.config.is_encoder_decoder
    labels = [rows["labels"][:, 1:] if causal else rows["labels"] for rows in micro_batches]
    num_tokens = torch.stack([(one != IGNORED_LABEL).sum() for one in labels]).sum()
    num_rows = sum(len(one) for one in labels)
    total = torch.zeros(())
    for rows in micro_batches:
        # Labels are needed only by an encoder-decoder that makes its decoder's inputs from them.
        makes_inputs = not causal and "decoder_input_ids" not in rows
        given = {name: tensor for name, tensor in rows.items() if name != "labels" or makes_inputs}
        output = model(**given, use_cache=False)
        # Each position predicts the next token.
        targets = F.pad(rows["labels"][:, 1:], (0, 1), value=IGNORED_LABEL) if causal else rows["labels"]
        if "logits" in output:
            losses = F.cross_entropy(
                output.logits.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=label_smoothing
            )
            loss = losses.sum() / num_tokens
        else:
            losses = _OfHidden.of_rows(output.last_hidden_state, rows)
            loss = losses.sum() / num_rows
        if getattr(output, "aux_loss", None) is not None:
            auxiliary = auxiliary_loss(model, output)
            loss = loss + auxiliary / len(micro_batches)
            _check_coefficient(model, rows, output.logits.dtype, auxiliary.detach())
        loss.backward()
        total = total + loss.detach()
    ties = model.all_tied_weights_keys
    gradients = {ties.get(name, name): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(float(total), gradients, losses.dtype)


def _check_coefficient(model: PreTrainedModel, rows: Batch, dtype: torch.dtype, auxiliary: torch.Tensor) -> None:
    """Raise UnsupportedModelError unless the model's own loss has the auxiliary loss with this coefficient."""
    with torch.no_grad():
        output = model(**rows, use_cache=False)
        targets = F.pad(rows["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
        mean = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL)
    own = output.loss - mean
    # The model's own loss computes in float32.
    rounding = 1e-4 if dtype in TOLERANCES else 0.1
    if abs(float(own - auxiliary)) > rounding * max(1.0, abs(float(own))):
        raise UnsupportedModelError(f"{model.config.model_type}: the auxiliary loss's coefficient is not known")


def split_step(
    model: PreTrainedModel,
    adapter: Adapter,
    batch: Batch,
    num_stages: int,
    *,
    splits_backward: bool = False,
    chunks: int = 1,
    packing: bool = False,
    recomputes_blocks: bool = False,
    ranks: Ranks | None = None,
) -> Step:
    """Run the same step in stages, all of them in this process, with recomputation, of stages or of blocks.

    With `ranks` this is one of several whose layers are divided.
    """
    cpu, models = torch.device("cpu"), stage_models(model, adapter, num_stages, ranks)
    loss_of = PLAIN if adapter.has_head else _OfHidden()
    stages = {
        n: Stage(one, lambda boundary: dict.fromkeys(adapter.sources(boundary), True), loss_of)
        for n, one in models.items()
    }
    edges = {(number, 0, 0): Edge(LocalChannel(cpu), LocalChannel(cpu)) for number in range(num_stages - 1)}
    micro_batches = make_micro_batches(
        adapter, [batch], MICRO_BATCHES, 0, 0, packing=packing, sequence_chunks=chunks, loss=loss_of
    )
    for one in models.values() if recomputes_blocks else ():
        one.checkpoint_blocks()
    table = build_schedule(
        "gpipe",
        num_stages,
        len(micro_batches),
        Placement.spread(num_stages, 1),
        recompute="none" if recomputes_blocks else "stage",
        chunks=chunks_of(micro_batches),
    )
    if splits_backward:
        table = _with_weights_last(table)
    loss = Executor({0: Row(stages)}, edges).run(table, micro_batches).loss
    assert loss is not None
    parts = {name: (one, p.grad) for one in models.values() for name, p in one.parameters.items() if p.grad is not None}
    gradients = {name: one.whole(name, gradient) for name, (one, gradient) in parts.items()}
    return Step(float(loss), gradients, adapter.dtype)


def stage_models(
    model: PreTrainedModel, adapter: Adapter, num_stages: int, ranks: Ranks | None = None
) -> dict[int, StageModel]:
    """The stages of a model in this process, with its weights."""
    models = {}
    for number, layers in enumerate(partition(len(adapter.layers), num_stages, "count")):
        models[number] = assemble(adapter, layers, model, torch.device("cpu"), ranks=ranks)
        models[number].overlap_sums()
    share_within_process(models)
    return models


def _with_weights_last(table: Schedule) -> Schedule:
    """The table of one process with I for B, and before the updates every W."""
    (row,) = table.actions
    inputs = [replace(one, kind=INPUT) if one.kind == BACKWARD else one for one in row]
    weights = [replace(one, kind=WEIGHT) for one in row if one.kind == BACKWARD]
    end = next(place for place, one in enumerate(row) if one.kind == UPDATE)
    return replace(table, actions=((*inputs[:end], *weights, *inputs[end:]),))


def turn_randomness_off(config: Any) -> None:
    """Set what is random in the forward of a configuration's model to what is not."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            turn_randomness_off(value)
        elif isinstance(value, float) and any(word in name for word in ("drop", "noise", "jitter")):
            setattr(config, name, 0.0)
        elif name == "second_expert_policy":
            # NLLB-MoE's others than this draw whether a token has a second expert.
            setattr(config, name, "all")
