"""Divide the layers of a stage that has its weights: each rank keeps its part of every divided layer.

The classes of single modules are extended, as everywhere in this package, and forwards stay the library's: a column
layer's input enters the divided part, and a row layer's output leaves it. Modules keep their names, so files,
optimizers and ties know parameters as without a division, and a parameter's `Cut` says which part of it is here.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import xxhash
from torch import nn
from transformers import PreTrainedConfig

from hf_gpipe.adapters.division import StageDivision
from hf_gpipe.adapters.guards import check_hooks
from hf_gpipe.adapters.modules.intercept import extend_class
from hf_gpipe.adapters.modules.linear import hand_over
from hf_gpipe.adapters.modules.quantised import is_4bit, part_of_4bit
from hf_gpipe.adapters.modules.weight_gradients import DuringSums, WeightGradients
from hf_gpipe.adapters.parts.cuts import Cut, VocabularyPart
from hf_gpipe.adapters.parts.ranks import Ranks, enter, exchange, leave
from hf_gpipe.errors import CheckpointError
from hf_gpipe.libraries.transformers import Conv1D
from hf_gpipe.modes.tensor_parallel.masks import WholeMasks
from hf_gpipe.modes.tensor_parallel.plan import SplitPlan
from hf_gpipe.modes.tensor_parallel.region import Region


class Division(StageDivision):
    """The division of a stage's layers, of which this rank has its part.

    Args:
        plan: the plan of the model.
        ranks: the ranks of the worker.
        has_dropout: whether a forward in training may draw masks.
    """

    def __init__(self, plan: SplitPlan, ranks: Ranks, *, has_dropout: bool) -> None:
        self.plan, self.ranks = plan, ranks
        self._region, self._has_dropout = Region(ranks), has_dropout

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a parameter, or of a tensor of its shape; a divided part has memory of its own."""
        cut = self.plan.cuts.get(name)
        if cut is None:
            return whole
        return part_of(whole, cut, self.ranks.place)

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter, or of a tensor of its shape, from all ranks, which all call it.

        Raises CheckpointError where this rank has other values than the first rank with the same part. Each of them
        updates its copy from equal gradients, so only this check notices a device that computes wrong values.
        """
        cut, ranks = self.plan.cuts.get(name), self.ranks
        if cut is None:
            whole, own = part, torch.tensor(_digest(part))
            is_same = torch.equal(own, ranks.total(own if ranks.place == 0 else torch.zeros_like(own)))
        else:
            whole = cut.gathered(part, ranks)
            is_same = not cut.is_shared or _digest(cut.part(whole, ranks.place)) == _digest(part)
        if not is_same:
            raise CheckpointError(
                f"rank {ranks.place} of the {ranks.size} that share a stage has another {name} than "
                "the first rank, and both were computed alike; begin again from an older checkpoint, and on other "
                "devices if it happens again"
            )
        return whole

    def whole_shape(self, name: str, part: torch.Tensor) -> torch.Size:
        """The shape of the whole that a part is of."""
        cut = self.plan.cuts.get(name)
        return part.shape if cut is None else cut.whole_shape(part)

    def counted(self, name: str, gradient: torch.Tensor) -> list[torch.Tensor]:
        """The part of the gradient of this rank's part of a parameter that counts in sums over ranks, each on one."""
        cut = self.plan.cuts.get(name)
        if cut is None:
            return [gradient] if self.ranks.place == 0 else []
        return cut.counted(gradient, self.ranks.place) if cut.is_shared else [gradient]

    def logits(self, part: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary (..., V) from the logits of this rank's part."""
        head = next((name for name, kind in self.plan.modules.items() if kind == "head"), None)
        if head is None:
            return part
        cut, ranks = replace(self.plan.cuts[self.plan.weights[head]], dim=part.dim() - 1), self.ranks
        # All ranks compute the same loss from the whole logits, so backward takes a part of their gradient.
        return exchange(
            part,
            lambda own: ranks.total(cut.spread(own, ranks.place)),
            lambda outer: cut.part(outer, ranks.place),
        )

    def apply(self, model: nn.Module, ties: Mapping[str, str], blocks: frozenset[str]) -> None:
        """Divide a model with weights, whole or a stage's. It shares no parameter with another model any more.

        Args:
            model: the model.
            ties: alias -> name of the parameter that it is tied to.
            blocks: names of all blocks.
        """
        parts: dict[nn.Parameter, Any] = {}
        #: Tied parameters have several names, and one sum.
        summed: set[nn.Parameter] = set()
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            own = ties.get(name, name)
            if parameter not in parts:
                check_hooks(own, parameter, "a rank's part, with tensor_parallel")
                part = self.part(own, parameter)
                if part is parameter and not is_4bit(part):
                    part = parameter.detach().clone()
                # Parts of quantised weights have a class of parameters of their own.
                parts[parameter] = part if is_4bit(part) else nn.Parameter(part, parameter.requires_grad)
            if own in self.plan.shared and not is_4bit(parts[parameter]) and parameter not in summed:
                summed.add(parameter)
                self._sum_gradient(own, parts[parameter])
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, parts[parameter])
        for name, buffer in list(model.named_buffers()):
            if name in self.plan.cuts:
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, self.part(name, buffer))
        named = list(model.named_modules(remove_duplicate=False))
        with_weights = {name: module for name, module in named if any(True for _ in module.parameters())}
        for name, module in with_weights.items():
            self._extend(name, module, blocks)

    @property
    def has_sums(self) -> bool:
        return True

    def overlap(self, model: nn.Module, gradients: WeightGradients) -> None:
        """Let the column layers of a model compute their weights' gradients while their input's gradient is summed.

        Args:
            model: the model, divided.
            gradients: the stage's, which receives the weight gradients.
        """
        self._region.during_sums = during_sums = DuringSums(gradients)
        for name, module in model.named_modules():
            if self.plan.modules.get(name) == "column":
                hand_over(module, during_sums)

    def _sum_gradient(self, name: str, parameter: nn.Parameter) -> None:
        """Let every backward add the sum over the ranks that have the parameter to its gradient."""
        cut, ranks = self.plan.cuts.get(name), self.ranks

        def total(gradient: torch.Tensor) -> torch.Tensor:
            return ranks.total(gradient) if cut is None else cut.total(gradient, ranks)

        is_trained = parameter.requires_grad
        parameter.requires_grad_(True).register_hook(total)  # a frozen one may be trained later
        parameter.requires_grad_(is_trained)

    def _extend(self, name: str, module: Any, blocks: frozenset[str]) -> None:
        """Change the class and the attributes of one module of the model."""
        plan, place, part = self.plan, self.ranks.place, self.plan.modules.get(name)
        if part in ("column", "row", "head"):
            shape = module.weight.quant_state.shape if is_4bit(module.weight) else module.weight.shape
            outputs, inputs = reversed(shape) if isinstance(module, Conv1D) else shape
            names = ("nf", "nx") if isinstance(module, Conv1D) else ("out_features", "in_features")
            vars(module).update(zip(names, (outputs, inputs), strict=True))
            if part == "head":
                cut = plan.cuts[plan.weights[name]]
                module.vocabulary = VocabularyPart(cut.parts[place][0][0], cut.parts[-1][0][1], self.ranks)
                # A hook: those before it, such as of a loss that reads hidden states, see them outside.
                module.register_forward_pre_hook(lambda _, args: enter(args[0], self.ranks))
            else:
                module.units = plan.units.get(name)
                _extended(module, _Column if part == "column" else _Row, self._region)
        elif part == "table":
            module.first = plan.cuts[plan.weights[name]].parts[place][0][0]
            module.num_embeddings = len(module.weight)
            if module.padding_idx is not None:
                own = module.padding_idx - module.first
                module.padding_idx = own if 0 <= own < len(module.weight) else None
            _extended(module, _Table, self._region)
        elif plan.modules.get(f"{name}.base_layer") == "table":
            _extended(module, _AdaptedTable, self._region)
        elif hasattr(module, "lora_dropout"):
            base = f"{name}.base_layer"
            units = plan.cuts[f"{base}.weight"].lengths if plan.modules.get(base) == "row" else None
            for dropout in module.lora_dropout.values():
                dropout.units = units
                _extended(dropout, _AdapterDropout, self._region)
        elif part == "experts":
            _extended(module, _Experts, self._region)
        elif name in plan.heads_of:
            self._set_heads(name, module)
        elif name in blocks:
            _extended(module, _BlockWithDropout if self._has_dropout else _Block, self._region)

    def _set_heads(self, name: str, attention: Any) -> None:
        """Let an attention know its part of the heads alone."""
        place = self.ranks.place
        values = self.plan.attributes(name, place)
        config = getattr(attention, "config", None)
        if isinstance(config, PreTrainedConfig):
            attention.config = copy.copy(config)  # some forwards read the numbers there
        for own, value in values.items():
            for holder in (attention, attention.config) if isinstance(config, PreTrainedConfig) else (attention,):
                if isinstance(getattr(holder, own, None), int):
                    setattr(holder, own, value)
        if "alibi" in inspect.signature(type(attention).forward).parameters:
            attention.heads = self.plan.heads_of[name].queries[place]
            _extended(attention, _WithBiases, self._region)


def _extended(module: Any, mixin: type, region: Region) -> None:
    module._region = region
    extend_class(module, mixin)


def _digest(tensor: torch.Tensor) -> int:
    """A hash of the bytes of a tensor."""
    return xxhash.xxh3_64_intdigest(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()) >> 1


def part_of(whole: torch.Tensor, cut: Cut, place: int) -> torch.Tensor:
    """Return a rank's part of a parameter, in memory of its own; it is trained if the parameter is."""
    if is_4bit(whole):
        return part_of_4bit(whole, cut, place)
    # Optimizers' kernels need the layout of the parameter, and the whole must not be kept.
    part = cut.part(whole.detach(), place).clone(memory_format=torch.contiguous_format)
    return part.requires_grad_(whole.requires_grad)


class _Divided:
    """Mixed into the class of a module that has a part; the module's own class follows in the MRO."""

    _region: Region


class _Column(_Divided):
    """A linear layer with a part of the outputs."""

    units: tuple[int, ...] | None

    def __call__(self, input: torch.Tensor) -> Any:
        return super().__call__(self._region.enter(input, self.units))  # type: ignore[misc]


class _Row(_Divided):
    """A linear layer with a part of the inputs. Its bias is added to the sum over the ranks."""

    _parameters: dict[str, nn.Parameter | None]

    def __call__(self, input: torch.Tensor) -> Any:
        bias = self._parameters.get("bias")
        if bias is None:
            return self._region.leave(super().__call__(input))  # type: ignore[misc]
        # A `Conv1D` needs a bias.
        without = torch.zeros_like(bias, requires_grad=False) if isinstance(self, Conv1D) else None
        self._parameters["bias"] = without  # type: ignore[assignment]
        try:
            output = super().__call__(input)  # type: ignore[misc]
        finally:
            self._parameters["bias"] = bias
        output = self._region.leave(output)
        return output + bias.to(output.dtype)


class _Experts(_Divided):
    """Experts of which each has a part of its width here; hidden states (N, D) and the weights of experts enter."""

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        ranks = self._region.ranks
        return leave(super().__call__(enter(hidden, ranks), index, enter(weights, ranks)), ranks)  # type: ignore[misc]


class _Table(_Divided):
    """An embedding with a part of the vocabulary."""

    first: int
    num_embeddings: int

    def __call__(self, ids: torch.Tensor) -> Any:
        return self.of_all(ids, super().__call__)  # type: ignore[misc]

    def of_all(self, ids: torch.Tensor, embed: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the embeddings of tokens (..., D). `embed` gives the embeddings of the tokens in this part."""
        own = ids - self.first
        is_foreign = (own < 0) | (own >= self.num_embeddings)
        embedded = embed(own.masked_fill(is_foreign, 0))
        return leave(embedded.masked_fill(is_foreign[..., None], 0), self._region.ranks)


class _AdaptedTable(_Divided):
    """LoRA beside an embedding: its first factor has a part of the vocabulary."""

    base_layer: _Table

    def _embed(self, ids: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        embed = super()._embed  # type: ignore[misc]
        return self.base_layer.of_all(ids, lambda own: embed(own, weight, *args, **kwargs))


class _AdapterDropout(_Divided):
    """The dropout of what enters LoRA, which may run after the layer beside it has entered or left the divided part."""

    units: tuple[int, ...] | None

    def __call__(self, input: torch.Tensor) -> Any:
        with self._region.being(self.units):
            return super().__call__(input)  # type: ignore[misc]


class _WithBiases(_Divided):
    """An attention that gets the biases of all heads (B * heads, 1, T), ALiBi's (arXiv 2108.12409)."""

    heads: tuple[int, int]

    def __call__(self, *args: Any, alibi: torch.Tensor, **kwargs: Any) -> Any:
        first, stop = self.heads
        of_heads = alibi.view(len(args[0]), -1, *alibi.shape[1:])[:, first:stop]
        return super().__call__(*args, alibi=of_heads.flatten(0, 1), **kwargs)  # type: ignore[misc]


class _Block(_Divided):
    """A block, which begins outside of the divided part. Its forward may end before it has left it: transformers'
    checkpointing stops as soon as it has what backward needs.
    """

    training: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._region.reset()
        return super().forward(*args, **kwargs)  # type: ignore[misc]  # that of the block's class, next in the MRO


class _BlockWithDropout(_Block):
    """A block whose dropout draws whole masks, also when it runs again in backward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with WholeMasks(self._region) if self.training else nullcontext():
            return super().forward(*args, **kwargs)
