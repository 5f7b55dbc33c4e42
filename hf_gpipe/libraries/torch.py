"""The private and undocumented names of torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # a tensor of a device without its memory
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # within it every new tensor is fake
from torch.distributed import distributed_c10d
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm  # noqa: F401  # BatchNorm1d, 2d, 3d and SyncBatchNorm
from torch.nn.modules.dropout import _DropoutNd as AnyDropout  # noqa: F401  # every kind of dropout
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # sees every operation below autograd
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten as tree_flatten  # nested lists, tuples and dicts as their leaves
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils.flop_counter import flop_registry as flop_registry  # the operations of each product, by its name
from torch.utils.flop_counter import sdpa_backward_flop_count as sdpa_backward_flop_count
from torch.utils.flop_counter import sdpa_flop_count as sdpa_flop_count  # operations of attention, by shapes
from torch.utils.weak import WeakIdKeyDictionary as WeakIdKeyDictionary  # by the objects themselves, which it lets go

_aten: Any = torch.ops.aten
_C: Any = torch._C

# ---------------------------------------------------------------------- operations

#: Multiplies groups of rows by a matrix each: (rows, D), (E, D, D'), ends of the groups -> (rows, D').
grouped_mm: Any = torch._grouped_mm
#: The operation of the same name that autograd and the dispatcher see.
ATEN_GROUPED_MM: Any = _aten._grouped_mm
#: A view that may be changed in place; linear layers make their output's shape with it.
unsafe_view: Any = _aten._unsafe_view
#: Attention on a CPU without its matrix of probabilities, and its backward.
CPU_FLASH_ATTENTION: Any = _aten._scaled_dot_product_flash_attention_for_cpu
CPU_FLASH_ATTENTION_BACKWARD: Any = _aten._scaled_dot_product_flash_attention_for_cpu_backward


def multiply_all(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply tensors in place by a number, in few kernels."""
    multiply: Any = torch._foreach_mul_
    multiply(list(tensors), factor)


def norms(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The Euclidean norm () of each tensor, summed in a type, in few kernels."""
    return list(torch._foreach_norm(list(tensors), 2, dtype))


def schema_of(operation: Any) -> Any:
    """The schema of an operation: its `name`, `arguments`, and whether it `is_mutable`."""
    return operation._schema


def subclass_of(cls: type, tensor: torch.Tensor, **options: Any) -> Any:
    """The tensor as one of a subclass, which `__init__` is not called for, without gradients."""
    return torch.Tensor._make_subclass(cls, tensor, False, **options)


# ---------------------------------------------------------------------- tensors


def version_of(tensor: torch.Tensor) -> int:
    """How many times the tensor, or one with the same memory, was changed in place."""
    return tensor._version


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that this one is a view of."""
    return tensor._base


def storage_id(storage: torch.UntypedStorage) -> int:
    """A number that storages have in common if they are the same memory, also where it is none."""
    return storage._cdata


def key_set_of(tensor: torch.Tensor) -> Any:
    """The set of the dispatcher's keys of a tensor, which says by which kernels operations run on it."""
    return _C._dispatch_key_set(tensor)


def gradient_hooks(parameter: torch.Tensor) -> Any:
    """The hooks that autograd calls with the gradient of a tensor, by number; None or empty: there are none."""
    return parameter._backward_hooks


def accumulation_hooks(parameter: torch.Tensor) -> Any:
    """The hooks that autograd calls once it has added to `grad`, by number; None or empty: there are none."""
    return parameter._post_accumulate_grad_hooks


def keeping_versions(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Context manager in which changes in place are not noticed by autograd."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


def is_profiling() -> bool:
    """Whether a profiler records."""
    return torch.autograd._profiler_enabled()


# ---------------------------------------------------------------------- modes

#: As `__torch_function__` of a subclass of Tensor: results are plain tensors.
plain_results: Any = torch._C._disabled_torch_function_impl


def no_functions() -> AbstractContextManager[None]:
    """Context manager in which no TorchFunctionMode and no subclass's `__torch_function__` is called."""
    return torch._C.DisableTorchFunction()


def no_subclass_functions() -> AbstractContextManager[None]:
    """Context manager in which no subclass's `__torch_function__` is called; modes still are."""
    return torch._C.DisableTorchFunctionSubclass()


def no_modes() -> AbstractContextManager[Any]:
    """Context manager outside of all modes of the dispatcher, such as that of fake tensors."""
    return _disable_current_modes()


def no_dispatch() -> AbstractContextManager[None]:
    """Context manager in which neither modes nor subclasses of the dispatcher are called."""
    return _C._DisableTorchDispatch()


def fake_mode() -> Any:
    """The innermost mode of fake tensors; None: there is none."""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE)


def guard_memory(fake: Any, mode: Any) -> None:
    """Let a fake tensor made by `subclass_of` answer for its memory as the mode's own tensors do."""
    if mode._allow_unsafe_data_ptr_access:
        _C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        _C._set_throw_on_mutable_data_ptr(fake)


# ---------------------------------------------------------------------- modules


def hooks_of(module: nn.Module) -> dict[str, list[Any]]:
    """The hooks that were put on a module, by the pass that calls them: "forward" and "backward"."""
    kinds = {
        "forward": (module._forward_hooks, module._forward_pre_hooks),
        "backward": (module._backward_hooks, module._backward_pre_hooks),
    }
    return {kind: [hook for hooks in both for hook in hooks.values()] for kind, both in kinds.items()}


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters by name, not those of its parts; None: a bias that is turned off."""
    return module._parameters


def parts_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The modules right inside of a module by name; one that is there twice has both names."""
    return module._modules


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own buffers by name, not those of its parts; None: one that is not there."""
    return module._buffers


def saved_buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's own buffers that its `state_dict` has, by name."""
    saved = buffers_of(module).items()
    return {n: b for n, b in saved if b is not None and n not in module._non_persistent_buffers_set}


def is_compiled(module: nn.Module) -> bool:
    """Whether `compile` was called on the module itself."""
    return module._compiled_call_impl is not None


# ---------------------------------------------------------------------- groups of processes


def default_store() -> dist.Store:
    """The store of the default group. Raises ValueError if there is none."""
    return distributed_c10d._get_default_store()


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The time limit of a group's calls. Raises AttributeError or RuntimeError where its backend has none."""
    backend: Any = group._get_backend(group._device_types[0])
    limit: timedelta = backend.options._timeout
    return limit


def loopback_group(store: dist.Store, rank: int, timeout: timedelta) -> Any:
    """One of two gloo groups of a process that exchange messages through the machine's own address."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname="127.0.0.1")], timeout
    return gloo(store, rank, 2, options)
