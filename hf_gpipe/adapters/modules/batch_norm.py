"""Batch normalisation as GPipe has it (arXiv 1811.06965, section 2.2).

In training a micro-batch is normalised by its own statistics. The moving averages, by which evaluation normalises,
follow the statistics of whole mini-batches. They change once, at the end of a step. Until then each micro-batch's
statistics are kept, and a recomputation finds them there already.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from itertools import groupby

import torch
from torch import nn
from torch.nn import functional as F

from hf_gpipe.adapters.modules.autocast import HALF_PRECISION
from hf_gpipe.adapters.modules.sync_batch_norm import Gather, normalise
from hf_gpipe.errors import DataError, UnsupportedModelError
from hf_gpipe.libraries.torch import AnyBatchNorm


def batch_norms_of(model: nn.Module) -> dict[str, AnyBatchNorm]:
    """The layers that normalise batches, by name; one that stands in several places once for each."""
    named = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in named if isinstance(module, AnyBatchNorm)}


def hold_averages(model: nn.Module) -> None:
    """Let no forward of a model change moving averages.

    The layers are set to evaluation, in which a forward needs no more than one value of each channel. In training they
    normalise by the statistics of what they are given.

    Raises:
        UnsupportedModelError: a layer has no moving averages, a forward of its own, or several places.
    """
    places: dict[int, str] = {}
    for name, module in batch_norms_of(model).items():
        if type(module).forward not in (AnyBatchNorm.forward, nn.SyncBatchNorm.forward):
            raise UnsupportedModelError(
                f"{name!r} is a {type(module).__name__}, whose forward is not that of torch's BatchNorm, so its "
                "statistics are not known to be those of a micro-batch; use BatchNorm1d, BatchNorm2d, BatchNorm3d or "
                "SyncBatchNorm"
            )
        if (other := places.setdefault(id(module), name)) != name:
            raise UnsupportedModelError(
                f"{name!r} and {other!r} are one {type(module).__name__}, whose moving averages would be those of two "
                "places; give each place a layer of its own"
            )
        if module.running_mean is None or not module.track_running_stats:
            raise UnsupportedModelError(
                f"{name!r} is a {type(module).__name__} without moving averages, so the numbers of an evaluation would "
                "depend on the number of micro-batches; set track_running_stats=True, or use a GroupNorm"
            )
        module.track_running_stats = False
        module.eval()


def follow_averages(model: nn.Module) -> None:
    """Let forwards in training change the moving averages again, for a model that is not run by stages."""
    for module in batch_norms_of(model).values():
        module.track_running_stats = True
        module.train()


class BatchNorms:
    """The layers of a stage that normalise batches, and the statistics of a step's micro-batches.

    Statistics are (3, C) in float64 on the stage's device, of all channels C of all layers: the number of values, their
    mean, and the sum of their squared deviations from it.

    Args:
        model: the stage's model. Its averages are held (`hold_averages`).
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = batch_norms_of(model)
        #: The statistics of each micro-batch, by its number.
        self._known: dict[int, torch.Tensor] = {}
        #: The statistics of the micro-batch whose forward runs now, by layer; None: they are known, or not wanted.
        self._found: dict[str, torch.Tensor] | None = None
        #: Gathers a tensor of each replica, where these share statistics.
        self.gather: Gather | None = None
        #: The number of the micro-batch whose forward runs now; all replicas' statistics, by micro-batch and layer.
        self._index = -1
        self._shared: dict[int, dict[str, torch.Tensor]] = {}
        for name, layer in self._layers.items():
            forward = self._synchronised if isinstance(layer, nn.SyncBatchNorm) else self._own
            layer.forward = partial(forward, name, layer)  # type: ignore[method-assign]

    def __bool__(self) -> bool:
        return bool(self._layers)

    def _own(self, name: str, layer: AnyBatchNorm, input: torch.Tensor) -> torch.Tensor:
        """The forward of a layer, which notes the statistics that it computes anyway."""
        if not layer.training:
            return AnyBatchNorm.forward(layer, input)
        assert layer.running_mean is not None
        assert layer.running_var is not None
        count = 0 if self._found is None else self._count(name, input)
        # Averages that follow with a momentum of 1 are the statistics themselves. Their type is that of the averages,
        # also under autocast. And a recomputed forward saves the same tensors as the first one.
        mean, variance = torch.zeros_like(layer.running_mean), torch.zeros_like(layer.running_var)
        output = F.batch_norm(
            input, mean, variance, layer.weight, layer.bias, training=True, momentum=1.0, eps=layer.eps
        )
        if count and mean.dtype in HALF_PRECISION:
            self._note(name, count, input)
        elif count:
            self._add(name, count, mean, variance.double() * (count - 1))
        return output

    def _synchronised(self, name: str, layer: AnyBatchNorm, input: torch.Tensor) -> torch.Tensor:
        if self.gather is None or not layer.training:
            return self._own(name, layer, input)
        shared = self._shared.setdefault(self._index, {})
        if name not in shared:
            shared[name] = reduce(_joined, self.gather(self._note(name, self._count(name, input), input)))
        return normalise(layer, input, shared[name], self.gather)

    @contextmanager
    def of_micro_batch(self, index: int) -> Iterator[None]:
        """Context manager for a training forward of a micro-batch, the first one or another."""
        self._index = index
        if not self or index in self._known:
            yield
            return
        self._found = {}
        try:
            yield
            first = next(iter(self._found.values()), torch.empty(0))
            absent = {name: first.new_zeros(3, layer.num_features) for name, layer in self._layers.items()}
            self._known[index] = torch.cat(list((absent | self._found).values()), dim=1)
        finally:
            self._found = None

    def _count(self, name: str, values: torch.Tensor) -> int:
        """How many values of each channel a layer is given, for the first time in this forward."""
        assert self._found is not None, "the first forward of a micro-batch notes its statistics"
        if name in self._found:
            raise UnsupportedModelError(
                f"{name!r} is called twice in a forward, and its moving averages would be those of two places; give "
                "each place a layer of its own"
            )
        count = values.numel() // values.shape[1]
        if count < 2:
            raise DataError(
                f"{name!r} is given {count} value of each channel of a micro-batch, and statistics need two; use fewer "
                "micro-batches, or more rows"
            )
        return count

    @torch.no_grad()
    def _note(self, name: str, count: int, values: torch.Tensor) -> torch.Tensor:
        """Compute the statistics of what a layer is given, in float32 at least."""
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        variance, mean = torch.var_mean(values, [0, *range(2, values.dim())], correction=0)
        return self._add(name, count, mean, variance.double() * count)

    def _add(self, name: str, count: int, mean: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        assert self._found is not None
        mean = mean.double()
        self._found[name] = torch.stack([torch.full_like(mean, count), mean, squares])
        return self._found[name]

    @torch.no_grad()
    def update(self, mini_batches: Sequence[Hashable], total: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        """Let the moving averages follow each mini-batch of a step, in order. Call it at the end of the step.

        Args:
            mini_batches: the mini-batch of each micro-batch of the step, including micro-batches of other replicas.
            total: sums a tensor on the CPU over the replicas of the stage; None: the stage has no replicas.
        """
        if not self:
            return
        channels = [layer.num_features for layer in self._layers.values()]
        self._shared.clear()
        statistics = torch.zeros(len(mini_batches), 3, sum(channels), dtype=torch.float64)
        for index, known in self._known.items():
            statistics[index] = known
        self._known.clear()
        # A micro-batch is zero on all replicas but its own, so the sum is exact.
        statistics = statistics if total is None else total(statistics)
        for _, numbers in groupby(range(len(mini_batches)), mini_batches.__getitem__):
            whole = reduce(_joined, [statistics[number] for number in numbers])
            for layer, (count, mean, squares) in zip(self._layers.values(), whole.split(channels, dim=1), strict=True):
                if count[0] > 0:
                    _follow(layer, mean, squares / (count - 1))

    def reset(self) -> None:
        """Drop the statistics of a failed step."""
        self._known.clear()
        self._shared.clear()


def _joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the statistics of the union of two sets of values (Chan, Golub and LeVeque 1979, the pairwise formula)."""
    (count, mean, squares), (more, other, others) = first, second
    both = count + more
    share = more / both.clamp(min=1)
    return torch.stack(
        [both, mean + (other - mean) * share, squares + others + (other - mean).square() * count * share]
    )


def _follow(layer: AnyBatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Move the averages of a layer to the statistics of a mini-batch, as far as its momentum says."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    factor = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1 / float(layer.num_batches_tracked)
    for average, value in ((layer.running_mean, mean), (layer.running_var, variance)):
        average.copy_(average.double().lerp(value.to(average.device), factor or 0.0))
