"""Functions that a user has put on modules, such as `layer.mlp.forward = f`, and how a stage gets them.

A stage is built from the model's classes and takes the model's weights. A function on one module inside of a layer goes
along: what it refers to, as a bound method or in its closure, becomes the stage's own module of the same name. So it
computes with the stage's weights, on the stage's device. Functions that refer to anything outside of their layer, or
that replace what runs between the layers, are not supported.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_gpipe.errors import UserError
from hf_gpipe.libraries.accelerate import has_hook
from hf_gpipe.libraries.torch import is_compiled
from hf_gpipe.libraries.transformers import LOSS_ATTRIBUTE

#: Values in a closure that are the same for every module.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, type, ModuleType),
    *(torch.dtype, torch.device, torch.Size, PreTrainedConfig),
)


@dataclass(frozen=True)
class Patch:
    """A function on one module, in place of what the model's configuration makes.

    Attributes:
        layer: the name of the module of the layer list that it is in, such as a block.
        module: the name of the module.
        attribute: the name of the attribute that it replaces, such as "forward".
        value: the function.
    """

    layer: str
    module: str
    attribute: str
    value: Any

    def put(self, model: nn.Module, source: nn.Module) -> None:
        """Put the function on the same module of a stage's model.

        Args:
            model: the stage's model, which has the layer.
            source: the model that has the function.
        """
        setattr(model.get_submodule(self.module), self.attribute, self.value_on(model, source))

    def value_on(self, model: nn.Module, source: nn.Module) -> Any:
        """The function on another model; the arguments are those of `put`. Raises UserError where it cannot be put."""
        own = model.get_submodule(self.layer)
        modules = {
            id(module): own.get_submodule(name) for name, module in source.get_submodule(self.layer).named_modules()
        }
        return _Rebinding(modules, f"{self.attribute} of the module {self.module!r}").of(self.value)


def find_patches(model: PreTrainedModel, expected: PreTrainedModel, layers: tuple[str, ...]) -> tuple[Patch, ...]:
    """The functions on modules of a model that its configuration does not make.

    Args:
        model: the model in memory.
        expected: the same model built from its configuration.
        layers: the modules of the layer list; what is inside of them is run by a stage as it is.

    Raises:
        UserError: a function is outside of the layers, or refers to something outside of its layer.
    """
    wanted = dict(expected.named_modules())
    patches = []
    for name, module in model.named_modules():
        if is_compiled(module):
            raise UserError(
                f"{model.config.model_type}: the module {name or 'at the root'!r} was compiled, and stages would run "
                "it without; give the model before compile() and set torch_compile=True, so that stages compile blocks"
            )
        for attribute, value in _differing(module, wanted[name]):
            layer = next(
                (candidate for candidate in layers if name == candidate or name.startswith(f"{candidate}.")), None
            )
            if layer is None:
                raise UserError(
                    f"{model.config.model_type}: {attribute} of the module {name or 'at the root'!r} was replaced by "
                    f"{_text(value)}, and stages would not run it as the whole model does; replace functions of "
                    "modules inside of a layer, or give a loss as LogitsLoss(function) or compute_loss_func"
                )
            patches.append(Patch(layer, name, attribute, value))
    for patch in patches:
        patch.value_on(expected, model)  # raises its error
    return tuple(patches)


def _differing(module: nn.Module, wanted: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and values of the functions of a module that the configuration does not make."""
    names = {name for either in (module, wanted) for name, value in vars(either).items() if _is_function(value)}
    if has_hook(module):  # it moves inputs to the module's device
        names -= {"forward"}
    for name in sorted(names):
        if name.startswith("_") and name != LOSS_ATTRIBUTE:
            continue
        own, made = (vars(either).get(name) for either in (module, wanted))
        if not _is_same(own, made, module, wanted):
            yield name.removeprefix("_"), own


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, nn.Module | type)


def _is_same(own: Any, made: Any, module: nn.Module, wanted: nn.Module) -> bool:
    """Whether two functions, on two modules of the same name, do the same."""
    if isinstance(own, MethodType) and isinstance(made, MethodType):
        return own.__func__ is made.__func__ and (own.__self__ is module) == (made.__self__ is wanted)
    if isinstance(own, FunctionType) and isinstance(made, FunctionType):
        return own is made or own.__code__ is made.__code__
    if isinstance(own, partial) and isinstance(made, partial):
        is_same = _is_same(own.func, made.func, module, wanted)
        return is_same and (own.args, own.keywords) == (made.args, made.keywords)
    is_function = isinstance(own, FunctionType | MethodType | partial)
    return own is made or (type(own) is type(made) and own is not None and not is_function)


def _text(value: Any) -> str:
    """The name and the place of a function."""
    function = value.func if isinstance(value, partial) else getattr(value, "__func__", value)
    code = getattr(function, "__code__", None)
    where = "" if code is None else f" ({code.co_filename.rpartition('/')[2]}, line {code.co_firstlineno})"
    return f"{getattr(function, '__qualname__', repr(value))}{where}"


class _Rebinding:
    """Makes functions refer to other modules.

    Args:
        modules: the module that a function shall refer to, by the `id` of the module that it refers to.
        what: the function's name, for errors.
    """

    def __init__(self, modules: Mapping[int, nn.Module], what: str) -> None:
        self._modules, self._what = modules, what
        self._functions: dict[int, FunctionType] = {}

    def of(self, value: Any) -> Any:
        """The value with other modules. Raises UserError where it refers to something that cannot be exchanged."""
        if isinstance(value, nn.Module):
            if id(value) not in self._modules:
                raise self._unsupported(f"a {type(value).__name__} that is not in the same layer")
            return self._modules[id(value)]
        if isinstance(value, MethodType):
            return MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, partial):
            return partial(self.of(value.func), *map(self.of, value.args), **self._of_dict(value.keywords))
        if isinstance(value, FunctionType):
            return self._of_function(value)
        if isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, torch.Tensor):
            return value
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, list | tuple):
            return type(value)(map(self.of, value))
        if isinstance(value, dict):
            return self._of_dict(value)
        raise self._unsupported(f"a {type(value).__name__}, which cannot be taken to a stage")

    def _of_dict(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key: self.of(value) for key, value in values.items()}

    def _of_function(self, function: FunctionType) -> FunctionType:
        if id(function) in self._functions:
            return self._functions[id(function)]
        if function.__module__.partition(".")[0] in ("torch", "transformers", "peft"):
            return function
        for name, value in inspect.getclosurevars(function).globals.items():
            if isinstance(value, nn.Module | torch.Tensor):
                raise self._unsupported(f"the global variable {name!r}, a {type(value).__name__}")
        cells = tuple(CellType() for _ in function.__closure__ or ())
        copied = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells or None
        )
        self._functions[id(function)] = copied  # first: a function may refer to itself
        copied.__defaults__ = self.of(function.__defaults__)
        copied.__kwdefaults__ = self.of(function.__kwdefaults__)
        copied.__dict__.update(function.__dict__)
        copied.__qualname__, copied.__module__, copied.__doc__ = (
            function.__qualname__,
            function.__module__,
            function.__doc__,
        )
        for cell, original in zip(cells, function.__closure__ or (), strict=True):
            cell.cell_contents = self.of(original.cell_contents)
        return copied

    def _unsupported(self, what: str) -> UserError:
        return UserError(
            f"{self._what} was replaced by a function that refers to {what}; a stage has copies of the modules of its "
            "layers, so give the function by types.MethodType(f, module), or let it refer to modules of the same layer "
            "and to numbers only"
        )
