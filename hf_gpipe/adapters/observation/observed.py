"""One forward of a model without values: the shapes between its layers, and whether these form a chain.

A tensor on the meta device, or a fake one, has a shape and a type, and no values. Every operation of the forward is
seen, so each tensor is followed from the module that makes it to the one that reads it. In a chain a layer reads what
the layer before it has made, and the model's inputs, which every stage has. So does whatever the model computes between
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_gpipe.adapters.layers import Layer
from hf_gpipe.adapters.modules.intercept import hidden_of, with_hidden
from hf_gpipe.adapters.observation import fake_operations
from hf_gpipe.errors import UnsupportedModelError
from hf_gpipe.libraries.torch import TorchDispatchMode, no_functions, storage_id, tree_leaves, tree_map_only, version_of

_Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Observed:
    """The tensors without values that one forward passed on.

    Attributes:
        given: the hidden states that each layer receives.
        made: what each module of the layers returns, by its name.
        logits: what the model returns.
    """

    given: tuple[torch.Tensor, ...]
    made: Mapping[str, Any]
    logits: torch.Tensor


def observe(model: nn.Module, layers: Sequence[Layer], forward: Callable[[], Any]) -> Observed:
    """Run a model's forward, and follow its tensors.

    Args:
        model: the model, on the meta device or with fake tensors.
        layers: the model's layers.
        forward: calls the model on such inputs, and returns its logits.

    Raises:
        UnsupportedModelError: the layers form no chain: the message names the tensor and the two modules. Or the
            forward changes a buffer or a layer's input, so that a recomputed one would do it twice.
    """
    followed = _Followed(model, layers)
    versions = {name: version_of(buffer) for name, buffer in model.named_buffers()}
    with torch.no_grad(), followed.hooks(), followed:
        logits = forward()
    followed.check_result(logits)
    changed = [f"its buffer {name!r}" for name, buffer in model.named_buffers() if version_of(buffer) != versions[name]]
    changed += [f"in place what {name!r} receives" for name, tensor in followed.received.items() if version_of(tensor)]
    if changed:
        raise UnsupportedModelError(
            f"the forward of {type(model).__name__} changes {changed[0]}, and a recomputed forward would change it "
            "again; leave that out (inplace=False)"
        )
    return Observed(tuple(followed.given), followed.made, logits)


class _Followed(TorchDispatchMode):
    """Notes the last layer that had run when a tensor was made, and its maker, where the tensor depends on a layer.

    Tensors are known by their memory, so views are the same tensor. All are kept until the end, so that no other takes
    the place of one. A tensor that depends on the model's inputs alone is not noted: each stage makes it anew.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.given: list[torch.Tensor] = []
        self.made: dict[str, Any] = {}
        #: The tensor that stands for a layer's input, by the layer's first module.
        self.received: dict[str, torch.Tensor] = {}
        self._model, self._layers = model, layers
        #: The layers during and after which a tensor may be read, and the module that made it, by its memory.
        self._readers: dict[int, tuple[set[int], str]] = {}
        self._alive: list[torch.Tensor] = []
        self._layer = -1
        self._inside: list[str] = []
        self._weights: set[int] = set()
        for index, layer in enumerate(layers):
            for name in layer.all_modules:
                module = model.get_submodule(name)
                for path, tensor in [*module.named_parameters(prefix=name), *module.named_buffers(prefix=name)]:
                    readers, _ = self._readers.setdefault(_memory(tensor), (set(), path))
                    readers.add(index)
                    self._weights.add(_memory(tensor))

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Context manager in which the layers' modules tell when they are entered and left."""
        handles = []
        for index, layer in enumerate(self._layers):
            for position, name in enumerate(layer.modules):
                module = self._model.get_submodule(name)
                enter = self._entering(index, name, is_entrance=position == 0)
                handles += [module.register_forward_pre_hook(enter, with_kwargs=True)]
                handles += [module.register_forward_hook(self._leaving(name))]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, index: int, name: str, *, is_entrance: bool) -> Callable[..., _Call]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
            if name in self.made or index != self._layer + is_entrance:
                what = "is called again" if name in self.made else "is called out of its order"
                raise self._no_chain(f"{name!r} {what} after {self._where!r}")
            hidden = hidden_of(args, kwargs)
            if not isinstance(hidden, torch.Tensor):
                raise self._no_chain(
                    f"{name!r} after {self._where!r} is given a {type(hidden).__name__} where it needs a tensor first"
                )
            if is_entrance and index:
                self._check_read(hidden, name)
                if _memory(hidden) not in self._readers or not hidden.is_floating_point():
                    raise self._no_chain(
                        f"{name!r} is given a tensor {text_of(hidden)} that does not depend on "
                        f"{self._layers[self._layer].name!r}, which is before it"
                    )
            if is_entrance:
                before, self._layer = self._where, index
                self.given.append(torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device))
                if index:
                    # Another tensor, so that all that is read from before this layer comes through its entrance.
                    hidden = self.received[name] = self._note(torch.empty_like(self.given[-1]), before)
                    args, kwargs = with_hidden(hidden, args, kwargs)
            self._inside.append(name)
            return args, kwargs

        return enter

    def _leaving(self, name: str) -> Callable[..., Any]:
        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            self._inside.pop()
            self.made[name] = output
            # A copy of what is a view of the model's inputs: on another stage the stub's tensor stands there.
            return tree_map_only(
                torch.Tensor, lambda t: t if _memory(t) in self._readers else self._note(t.clone(), name), output
            )

        return leave

    def check_result(self, logits: Any) -> None:
        """Raise UnsupportedModelError unless the result depends on the last layer alone."""
        if not isinstance(logits, torch.Tensor):
            raise UnsupportedModelError(
                f"the forward of {type(self._model).__name__} returns a {type(logits).__name__}; it must return a "
                "tensor, or an object whose attribute logits is one"
            )
        self._check_read(logits, "the result")
        if self._layer != len(self._layers) - 1:
            name = self._layers[self._layer + 1].name
            raise self._no_chain(f"its forward does not call {name!r}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            self._check_read(tensor, self._where)
        with no_functions():
            result, _ = fake_operations.run(func, args, kwargs or {})
        read = {_memory(tensor) for tensor in tensors}
        if self._inside or not read.isdisjoint(self._readers):
            # A view of the model's inputs depends on them alone.
            of_inputs = read if read.isdisjoint(self._readers) else ()
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and _memory(tensor) not in of_inputs:
                    self._note(tensor, self._where)
        return result

    def _note(self, tensor: torch.Tensor, maker: str) -> torch.Tensor:
        if _memory(tensor) not in self._readers:
            self._readers[_memory(tensor)] = ({self._layer}, maker)
            self._alive.append(tensor)
        return tensor

    def _check_read(self, tensor: torch.Tensor, reader: str) -> None:
        readers, maker = self._readers.get(_memory(tensor), (None, ""))
        if readers is not None and not self._inside and _memory(tensor) in self._weights:
            raise self._no_chain(
                f"after {reader!r} its forward reads {maker!r} outside of the module that has it; "
                "let a module of its own read it"
            )
        if readers is not None and self._layer not in readers:
            raise self._no_chain(
                f"{reader!r} reads a tensor {text_of(tensor)} of {maker!r}, which is not of the "
                "layer before it; put the modules from the one to the other into one module"
            )

    def _no_chain(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{type(self._model).__name__} is no chain of layers: {what}")

    @property
    def _where(self) -> str:
        """The module that computes now, or after which the model's own forward does."""
        if self._inside:
            return self._inside[-1]
        return self._layers[self._layer].name if self._layer >= 0 else "the beginning"


def _memory(tensor: torch.Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def text_of(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
