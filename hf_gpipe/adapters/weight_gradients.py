"""Weight gradients of a stage's linear layers: matrix products that are computed in backward, or kept for later.

The gradient of a linear layer's weight is the product of two matrices, the layer's input and the gradient of its
output. Nothing in the backward of other layers needs it, so it can be computed at any time before the update (zero
bubble, arXiv 2401.10241). Each product is added to `.grad` by the matrix multiplication itself, without a temporary
tensor of the weight's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(slots=True, eq=False)
class Product:
    """One part of a parameter's gradient: the transpose of `left` times `right`, over N tokens.

    Attributes:
        parameter: whose `.grad` it is added to.
        left: (N, rows), the gradient of the layer's output; the layer's input where the weight is stored transposed.
        right: (N, columns), the other one of the two.
        index: the matrix of a three-dimensional parameter that it belongs to, such as an expert's; None: the only one.
        offsets: (E,), where the rows of `left` and `right` end that belong to each matrix of a three-dimensional
            parameter, which then has as many products; None: one product.
    """

    parameter: nn.Parameter
    left: torch.Tensor
    right: torch.Tensor
    index: int | None = None
    offsets: torch.Tensor | None = None

    def add(self) -> None:
        """Add it to `.grad`; the first part of a gradient is written, without zeros before."""
        parameter = self.parameter
        if self.index is not None:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            target: torch.Tensor | None = parameter.grad[self.index]
        else:
            target = parameter.grad
        if target is None:
            parameter.grad = self._value().to(parameter.dtype)
        elif self.offsets is None and target.dtype == self.left.dtype:
            target.addmm_(self.left.t(), self.right)
        else:
            target.add_(self._value())

    def whole(self) -> torch.Tensor:
        """The gradient of the whole parameter, for autograd."""
        value = self._value().to(self.parameter.dtype)
        if self.index is None:
            return value
        gradient = torch.zeros_like(self.parameter)
        gradient[self.index] = value
        return gradient

    def _value(self) -> torch.Tensor:
        if self.offsets is None:
            return self.left.t() @ self.right
        return torch._grouped_mm(self.left.t(), self.right, offs=self.offsets)


class WeightGradients:
    """Receives the products of a stage's backward: adds them to `.grad` at once, or keeps them."""

    def __init__(self) -> None:
        self._kept: list[Product] | None = None
        self._converted: dict[nn.Parameter, torch.Tensor] = {}

    def converted(self, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        """A parameter's values as autocast converts them, once for all uses until `forget`."""
        if parameter.dtype == torch.float64:
            return parameter.detach()
        found = self._converted.get(parameter)
        if found is None or found.dtype != dtype:
            found = self._converted[parameter] = parameter.detach().to(dtype)
        return found

    def forget(self) -> None:
        """Drop the converted values: the parameters may change."""
        self._converted.clear()

    @contextmanager
    def keeping(self) -> Iterator[list[Product]]:
        """Context manager for a backward: its products are kept in the list, in the order of that backward."""
        kept: list[Product] = []
        self._kept = kept
        try:
            yield kept
        finally:
            self._kept = None

    def put(self, product: Product) -> torch.Tensor | None:
        """Take a product. A parameter with hooks needs its gradient now: then the gradient for autograd is returned."""
        parameter = product.parameter
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return product.whole()
        if self._kept is None:
            product.add()
        else:
            self._kept.append(product)
        return None


def kept_bytes(products: Sequence[Product]) -> int:
    """Bytes of memory that products keep; layers with the same input share its memory."""
    kept = (tensor.untyped_storage() for one in products for tensor in (one.left, one.right))
    return sum({storage._cdata: storage.nbytes() for storage in kept}.values())
