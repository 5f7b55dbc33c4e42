"""The seam over linear layers: whatever multiplies by a trained weight gives its weight gradient to `WeightGradients`.

The forward of the layer is replaced on the one module, so that backward gives the gradient of the input at once and
hands over the two matrices whose product is the gradient of the weight. The result of the forward is the library's.
What is not a linear layer, or uses its weight in another way, keeps autograd's own backward, also where both happen to
one parameter: all of them add to the same `.grad`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hf_gpipe.adapters.modules.intercept import extend_class
from hf_gpipe.adapters.modules.weight_gradients import Product, WeightGradients
from hf_gpipe.libraries.torch import base_of, gradient_hooks, grouped_mm, parameters_of, parts_of, unsafe_view
from hf_gpipe.libraries.transformers import Conv1D


def hand_over(module: nn.Module, gradients: WeightGradients) -> None:
    """Let every linear layer in a module, itself included, give the gradients of its weight to `gradients`.

    These are `nn.Linear`, transformers' `Conv1D`, and modules such as experts and routers, whose matrices are
    parameters of their own. Subclasses with another forward, as for quantised weights, stay as they are.
    """
    for layer in module.modules():
        forward = type(layer).forward
        if "forward" in vars(layer):  # another one was put on the instance
            continue
        if any(p is not None and gradient_hooks(p) for p in parameters_of(layer).values()):
            continue  # autograd calls the hooks on gradients
        if forward in (nn.Linear.forward, Conv1D.forward):
            mixin: type = _Linear
        elif _holds_matrices(layer):
            mixin = _Matrices
        else:
            continue
        layer._weight_gradients = gradients  # type: ignore[assignment]
        extend_class(layer, mixin)


def _holds_matrices(module: nn.Module) -> bool:
    """Whether a module multiplies by matrices of its own: three-dimensional parameters, or nothing but matrices."""
    if type(module).__module__.startswith("torch.") or isinstance(module, nn.Linear | Conv1D | nn.Embedding):
        return False
    sizes = {parameter.dim() for parameter in parameters_of(module).values() if parameter is not None}
    return 3 in sizes or (2 in sizes and not parts_of(module))


def _is_trained(weight: torch.Tensor) -> bool:
    """Whether a weight is a parameter to be trained, and not computed from others, as by a parametrization."""
    return weight.requires_grad and weight.is_leaf


class _Linear:
    """Mixed into the class of an `nn.Linear`, or of a `Conv1D`, whose weight is (inputs, outputs)."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    _weight_gradients: WeightGradients

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if not (torch.is_grad_enabled() and _is_trained(weight)):
            output: torch.Tensor = super().forward(input)  # type: ignore[misc]  # the module's own class follows
            return output
        is_transposed = isinstance(self, Conv1D)
        return _multiply(self._weight_gradients, input, weight, self.bias, is_transposed=is_transposed)


class _Matrices:
    """Mixed into the class of a module whose own parameters are matrices, or tensors of matrices (E, rows, columns)."""

    _weight_gradients: WeightGradients

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module = cast(nn.Module, self)
        trained = {
            id(p): p for p in parameters_of(module).values() if p is not None and p.requires_grad and p.dim() > 1
        }
        if not (trained and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        # Inside the module's forward, so that it is also there when the forward runs again in backward.
        with _Products(self._weight_gradients, trained):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


class _Products(TorchFunctionMode):
    """Within a module's forward, takes the products by its matrices (rows, columns) or by one of (E, rows, columns).

    Args:
        gradients: receives the gradients of the matrices.
        trained: the module's trained parameters, by `id`.
    """

    def __init__(self, gradients: WeightGradients, trained: Mapping[int, nn.Parameter]) -> None:
        super().__init__()
        self._gradients, self._trained = gradients, trained

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS and len(args) > 1 and (parameter := self._parameter_of(args[1])) is not None:
            given, matrix, *rest = args
            if func is grouped_mm:
                offsets = kwargs.get("offs")
                others = [value for name, value in kwargs.items() if name != "offs" and value is not None]
                if offsets is not None and not others and not rest:
                    is_transposed = matrix is parameter
                    matrices = matrix.detach()
                    return _MultiplyGroups.apply(given, parameter, matrices, offsets, self._gradients, is_transposed)
            elif matrix.dim() == 2 and matrix.is_contiguous() and parameter.is_contiguous():
                bias = rest[0] if rest else kwargs.get("bias")
                is_transposed = func is not F.linear
                if matrix is parameter:
                    return _multiply(self._gradients, given, parameter, bias, is_transposed=is_transposed)
                if parameter.dim() == 3 and matrix.shape == parameter.shape[1:]:
                    index = (matrix.storage_offset() - parameter.storage_offset()) // parameter.stride(0)
                    factors = matrix.detach(), index
                    return _multiply(self._gradients, given, parameter, bias, *factors, is_transposed=is_transposed)
        return func(*args, **kwargs)

    def _parameter_of(self, matrix: torch.Tensor) -> nn.Parameter | None:
        """The parameter that a matrix is, or is a view of."""
        return self._trained.get(id(matrix if (base := base_of(matrix)) is None else base))


_PRODUCTS = {F.linear, torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.__matmul__, grouped_mm}


def _multiply(
    gradients: WeightGradients,
    given: torch.Tensor,
    parameter: nn.Parameter,
    bias: torch.Tensor | None,
    matrix: torch.Tensor | None = None,
    index: int | None = None,
    *,
    is_transposed: bool = False,
) -> torch.Tensor:
    """`F.linear(given, matrix, bias)`; with `is_transposed` the matrix is (inputs, outputs).

    Args:
        gradients: receives the gradient of the parameter.
        given: the layer's input, (..., inputs).
        parameter: the parameter that gets the gradient.
        bias: the layer's bias, (outputs,), or None.
        matrix: one of the parameter's matrices, without a graph; None: the parameter is the matrix.
        index: the number of that matrix in the parameter.
        is_transposed: whether the matrix is (inputs, outputs).
    """
    if torch.is_autocast_enabled(given.device.type):
        dtype = torch.get_autocast_dtype(given.device.type)
        # A function of ours gets what autocast would convert; its own conversions would have no graph.
        given, bias = _converted(given, dtype), None if bias is None else _converted(bias, dtype)
        matrix = gradients.converted(parameter, dtype) if matrix is None else _converted(matrix, dtype)
    output: torch.Tensor = _Multiply.apply(given, parameter, bias, matrix, gradients, index, is_transposed)
    return output


class _Multiply(torch.autograd.Function):
    """A product by a matrix, and a bias, whose backward does not compute the matrix's gradient: see `_multiply`."""

    @staticmethod
    def forward(
        ctx: Any,
        given: torch.Tensor,
        parameter: nn.Parameter,
        bias: torch.Tensor | None,
        matrix: torch.Tensor | None,
        gradients: WeightGradients,
        index: int | None,
        is_transposed: bool,
    ) -> torch.Tensor:
        matrix = parameter if matrix is None else matrix
        ctx.save_for_backward(given, matrix)
        ctx.of = parameter, gradients, index, is_transposed
        if not is_transposed:
            output = F.linear(given, matrix, bias)
        elif bias is None:
            output = given @ matrix
        else:
            output = torch.addmm(bias, _rows(given), matrix)
        # Not a view: a model may change it in place, and of a view from a function of ours autograd does not allow it.
        return unsafe_view(output, (*given.shape[:-1], output.shape[-1]))

    @staticmethod
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given, matrix = ctx.saved_tensors
        parameter, gradients, index, is_transposed = ctx.of
        rows = _rows(outer)
        of_given = of_bias = None
        if ctx.needs_input_grad[0]:
            of_given = (rows @ (matrix.t() if is_transposed else matrix)).view(given.shape)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        pair = rows, _rows(given)
        left, right = reversed(pair) if is_transposed else pair
        of_parameter = gradients.put(Product(parameter, left, right, index), has_input_gradient=of_given is not None)
        return of_given, of_parameter, of_bias, None, None, None, None


class _MultiplyGroups(torch.autograd.Function):
    """`grouped_mm` of groups of rows and a matrix each, whose backward does not compute the matrices' gradient.

    The matrices are a parameter, or its transpose.
    """

    @staticmethod
    def forward(
        ctx: Any,
        given: torch.Tensor,
        parameter: nn.Parameter,
        matrices: torch.Tensor,
        offsets: torch.Tensor,
        gradients: WeightGradients,
        is_transposed: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(given, matrices, offsets)
        ctx.of = parameter, gradients, is_transposed
        return grouped_mm(given, matrices, offs=offsets)

    @staticmethod
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given, matrices, offsets = ctx.saved_tensors
        parameter, gradients, is_transposed = ctx.of
        of_given = None
        if ctx.needs_input_grad[0]:
            of_given = grouped_mm(outer, matrices.transpose(-2, -1), offs=offsets)
        left, right = (given, outer) if is_transposed else (outer, given)
        of_parameter = gradients.put(Product(parameter, left, right, offsets=offsets))
        return of_given, of_parameter, None, None, None, None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor (..., width) as (N, width), also where the width is 0."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a tensor as autocast does: other types of up to 32 bits become `dtype`."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
