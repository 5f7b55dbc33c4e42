"""Any torch module as a chain of layers, such as an nn.Sequential or a Vision Transformer, with tensors as its inputs.

Shapes and types of what crosses a boundary are observed, once for each shape of a micro-batch (observed.py). They are
observed on the meta device, and under autocast on fake tensors of the device, because types depend on it.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_gpipe.adapters.auto_classes import IMAGE_CLASSIFICATION
from hf_gpipe.adapters.base import Adapter, Inputs, StageParts, Tensors
from hf_gpipe.adapters.chain_layers import find_layers, parts_of_sequential
from hf_gpipe.adapters.classifiers import ONE_CLASS, check_labels, check_range, no_labels, problem_of
from hf_gpipe.adapters.layers import Layer
from hf_gpipe.adapters.modules.autocast import Autocast, scope_of
from hf_gpipe.adapters.modules.batch_norm import hold_averages
from hf_gpipe.adapters.modules.head import FoundProjection
from hf_gpipe.adapters.observation.observations import Observations, Shapes
from hf_gpipe.adapters.observation.observed import Observed, observe, text_of
from hf_gpipe.adapters.observation.skeleton import copy_with_stubs
from hf_gpipe.adapters.stubs import Port
from hf_gpipe.errors import DataError, UnsupportedModelError, UserError
from hf_gpipe.libraries.torch import FakeTensorMode, no_modes, tree_map_only, version_of


class _EndOfStageError(Exception):
    """Ends the model's forward where the next stage's first layer would run."""


class _Stub(nn.Module):
    """Replaces a module of another stage: at the end of the stage it ends the forward, before it it returns zeros.

    The zeros have the right shape, and memory for what the model's own forward does in place. They never reach a layer.
    """

    def __init__(self, chain: Chain, name: str, port: Port | None) -> None:
        super().__init__()
        self._chain, self._name, self.port = chain, name, port

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        if self.port is not None:
            self.port.captured = first
            raise _EndOfStageError
        made = self._chain.observed.made[self._name]
        return tree_map_only(torch.Tensor, lambda t: first.new_zeros(t.shape, dtype=t.dtype), made)


class Chain(Adapter):
    """The layers of a torch module in memory.

    Args:
        module: the model. Its forward takes the entries of a mini-batch but `labels` by their names, or the only entry
            by position, and returns the logits or an object with an attribute `logits`.
        example: the shapes of a mini-batch, by which the layers are found. An nn.Sequential needs none.
        autocast: mixed precision of every forward; None: everything computes in the type of its inputs and weights.

    Raises:
        UserError: an example is needed, or the forward cannot run on the meta device.
        UnsupportedModelError: the module is no chain, or its numbers depend on how a mini-batch is cut.
    """

    projection = FoundProjection((), "the last layer of a chain is not known to be a projection")
    scores_targets = False
    counted = "rows"
    #: The shapes and types of the micro-batch whose forward runs now.
    observed: Observed

    def __init__(self, module: nn.Module, example: Shapes = (), autocast: Autocast | None = None) -> None:
        self.reference, self.autocast = _without_memory(module, torch.device("meta")).train(), autocast
        hold_averages(self.reference)
        self._fake = FakeTensorMode()
        if isinstance(module, PreTrainedModel):
            # Its loss is that of its problem_type, and its files have its configuration.
            self.config, self.is_classifier, self.labels_rows = self.reference.config, True, True
            self.given_config = self.config
        self.dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        self._takes = frozenset(inspect.signature(module.forward).parameters)
        self.observations = Observations(self._observe)
        if type(module).forward is nn.Sequential.forward:
            self.layers = parts_of_sequential(self.reference)
        elif not example:
            raise UserError(
                f"the layers of {type(module).__name__} are found by running it: give example=, a mini-batch, or make "
                "it an nn.Sequential"
            )
        else:
            self.check_keys([name for name, *_ in example])
            inputs = tuple(entry for entry in example if entry[0] not in self.loss_keys)
            with self._watched() as model:
                self.layers = find_layers(model, partial(self._forward_without_memory, model, inputs))
        names = {p: name for name, p in reversed(list(self.reference.named_parameters(remove_duplicate=False)))}
        covered = tuple(f"{name}." for layer in self.layers for name in layer.modules)
        if outside := [name for name in names.values() if not name.startswith(covered)]:
            raise UnsupportedModelError(
                f"the parameter {outside[0]!r} of {type(module).__name__} is in none of the modules that its forward "
                "calls one after the other; put it into the module that reads it"
            )
        every = self.reference.named_parameters(remove_duplicate=False)
        self.reference.all_tied_weights_keys = {name: names[p] for name, p in every if names[p] != name}

    # ------------------------------------------------------------------ the chain

    def skeleton(self, stubs: Mapping[str, nn.Module] | None = None) -> Any:
        return copy_with_stubs(self.reference, stubs or {})

    def stub(self, layer: Layer, name: str, port: Port | None) -> nn.Module:
        stub = _Stub(self, name, port)
        # Parts of the module of which the model's own forward reads an attribute, such as a type.
        stub.__dict__.update(self.reference.get_submodule(name).named_children())
        return stub

    def carry_shapes(self, boundary: int, inputs: Inputs) -> dict[str, tuple[int, ...]]:
        return {"hidden": tuple(self.observations(self._shapes_of(inputs)).given[boundary].shape)}

    def carry_dtype(self, boundary: int, name: str) -> torch.dtype:
        # The shapes of a message are asked for before its type.
        return self.observed.given[boundary].dtype

    def sources(self, boundary: int) -> dict[str, tuple[Layer, ...]]:
        return {"hidden": self.layers[:boundary]}

    def run(self, stage: StageParts, inputs: Inputs, carry: Tensors) -> dict[str, torch.Tensor]:
        self.observed = self.observations(self._shapes_of(inputs))
        if stage.start == 0 and stage.port.seeds is not None:
            # What the model's own forward draws before its first layer.
            stage.port.seeds.plant(self.layers[0].modules[0])
        try:
            return {"logits": self._forward(stage.model, inputs)}
        except _EndOfStageError:
            hidden, expected = stage.captured(), self.observed.given[stage.stop]
        if (hidden.shape, hidden.dtype) != (expected.shape, expected.dtype):
            raise RuntimeError(f"{text_of(hidden)} is sent, and {text_of(expected)} was agreed on")
        return {"hidden": hidden}

    def _forward(self, model: nn.Module, inputs: Inputs) -> Any:
        """Return the logits of inputs."""
        given = {name: tensor for name, tensor in inputs.items() if name not in self.loss_keys}
        output = model(**given) if given.keys() <= self._takes else model(*given.values())
        return getattr(output, "logits", output)

    def _shapes_of(self, inputs: Inputs) -> Shapes:
        return tuple((n, tuple(t.shape), t.dtype) for n, t in inputs.items() if n not in self.loss_keys)

    @contextmanager
    def _watched(self) -> Iterator[nn.Module]:
        """Context manager with the model to observe."""
        with no_modes():  # the planner's
            if self.autocast is None:
                yield self.reference
                return
            with self._fake:
                yield _without_memory(self.reference, self.autocast.device)

    def _observe(self, shapes: Shapes) -> Observed:
        with self._watched() as model:
            seen = observe(model, self.layers, partial(self._forward_without_memory, model, shapes))
        return Observed(*map(_as_meta, (seen.given, seen.made, seen.logits)))

    def _forward_without_memory(self, model: nn.Module, shapes: Shapes) -> Any:
        """The whole model's logits. Raises DataError where it cannot be run with inputs of these shapes."""
        device = torch.device("meta") if self.autocast is None else self.autocast.device
        try:
            inputs = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape, dtype in shapes}
            with torch.no_grad(), scope_of(self.autocast):
                logits = self._forward(model, inputs)
        except UserError:
            raise
        except Exception as error:  # whatever a user's module raises
            raise DataError(
                _FAILED.format(type(self.reference).__name__, shapes, type(error).__name__, error)
            ) from error
        if changed := [name for name, tensor in inputs.items() if version_of(tensor)]:
            raise UnsupportedModelError(
                f"the forward of {type(self.reference).__name__} changes {changed[0]!r} of a mini-batch in place, and "
                "each stage would change it again"
            )
        return logits

    # ------------------------------------------------------------------ its inputs

    def check_keys(self, batch: Collection[str]) -> None:
        given = [name for name in batch if name not in self.loss_keys]
        if "labels" not in batch or not given:
            raise DataError(f"a mini-batch needs labels and what the model reads; found {list(batch)}")
        if len(given) > 1 and (unknown := [name for name in given if name not in self._takes]):
            raise DataError(
                f"the batch has {unknown[0]!r}, which {type(self.reference).__name__}.forward does not take; leave it "
                "out"
            )

    def no_targets(self, batch: Tensors, *, reads_logits: bool) -> torch.Tensor:
        if self.config is None:
            return super().no_targets(batch, reads_logits=reads_logits)
        return no_labels(len(next(iter(batch.values()))), self.config)

    def size_of(self, batch: Tensors) -> int:
        return len(batch["labels"])

    def row_lengths(self, batch: Tensors) -> torch.Tensor:
        """Return the lengths of the rows, which are all the same."""
        return torch.ones(len(batch["labels"]), dtype=torch.long)

    def check_inputs(self, inputs: Inputs) -> None:
        self.observed = self.observations(self._shapes_of(inputs))
        if self.config is not None and problem_of(self.config) != ONE_CLASS:
            check_labels(inputs["labels"], self.config)

    def check_classes(self, inputs: Inputs) -> None:
        super().check_classes(inputs)
        labels, shape = inputs["labels"], tuple(self.observed.logits.shape)
        if self.config is not None:
            check_labels(labels, self.config)
        elif len(labels) != shape[0] or labels.numel() != math.prod(shape[:-1]):
            raise DataError(
                f"labels have the shape {tuple(labels.shape)}, and {type(self.reference).__name__} makes logits "
                f"{shape}, the scores of {shape[-1]} classes last; labels have the shape {shape[:-1]}"
            )
        else:
            check_range(labels, shape[-1], "let the last layer make more")

    def targets(self, inputs: Tensors) -> torch.Tensor:
        labels = inputs["labels"]
        if labels.is_floating_point():
            return torch.zeros(len(labels), 1, dtype=torch.long, device=labels.device)
        return labels.reshape(len(labels), -1)


_FAILED = (
    "the forward of {} cannot be run on the meta device, on which shapes are observed, with inputs {}: {}: {}; a "
    "forward may read no values of tensors (item, nonzero), and only tensors that are inputs, parameters or buffers"
)


def is_chain(model: Any) -> bool:
    """Whether a model in memory is a torch module that is not of transformers, or classifies images."""
    if isinstance(model, PreTrainedModel):
        return type(model).__name__ in IMAGE_CLASSIFICATION.names
    return isinstance(model, nn.Module) and not any(isinstance(part, PreTrainedModel) for part in model.modules())


def _as_meta(made: Any) -> Any:
    """Return tensors without memory, and without the mode in which they were made."""
    return tree_map_only(torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), made)


def _without_memory(module: nn.Module, device: torch.device) -> nn.Module:
    """Copy a module to the meta device, or with fake tensors of another device, made without a copy of weights."""
    memory: dict[int, torch.Tensor] = {}
    for tensor in chain(module.parameters(), module.buffers()):
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        is_parameter = isinstance(tensor, nn.Parameter)
        memory[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    try:
        return copy.deepcopy(module, memory)  # what it finds in memory it does not copy
    except Exception as error:  # whatever an attribute of the user's raises
        raise UserError(f"{type(module).__name__} cannot be copied: {type(error).__name__}: {error}") from error
