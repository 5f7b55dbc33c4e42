"""Weight gradients of a stage's linear layers: matrix products that are computed in backward, or kept for later.

The gradient of a linear layer's weight is the product of two matrices, the layer's input and the gradient of its
output. Nothing in the backward of other layers needs it, so it can be computed at any time before the update (zero
bubble, arXiv 2401.10241). Each product is added to `.grad` by the matrix multiplication itself, without a temporary
tensor of the weight's size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from hf_gpipe.libraries.torch import accumulation_hooks, gradient_hooks, grouped_mm, storage_id


@dataclass(slots=True, eq=False)
class Product:
    """One part of a parameter's gradient: the transpose of `left` times `right`, over N tokens.

    Attributes:
        parameter: the parameter to whose `.grad` the product is added.
        left: (N, rows), the gradient of the layer's output; the layer's input where the weight is stored transposed.
        right: (N, columns), the other one of these two matrices.
        index: the number of the matrix in a three-dimensional parameter, such as an expert's; None: the only matrix.
        offsets: (E,), where the rows of `left` and `right` end that belong to each matrix of a three-dimensional
            parameter, which then has as many products; None: one product.
    """

    parameter: nn.Parameter
    left: torch.Tensor
    right: torch.Tensor
    index: int | None = None
    offsets: torch.Tensor | None = None

    @property
    def has_hooks(self) -> bool:
        """Whether something waits for the parameter's gradient in backward."""
        parameter = self.parameter
        return bool(gradient_hooks(parameter) or accumulation_hooks(parameter))

    def add(self) -> None:
        """Add the product to `.grad`. The first part of a gradient is written there, without zeros before."""
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
        return grouped_mm(self.left.t(), self.right, offs=self.offsets)


class WeightGradients:
    """Receives the products of a stage's backward: adds them to `.grad` at once, or keeps them.

    Attributes:
        is_of_all: whether every linear layer of the stage's blocks gives its products here.
    """

    def __init__(self) -> None:
        self.is_of_all = False
        self._kept: list[Product] | None = None
        self._converted: dict[nn.Parameter, torch.Tensor] = {}

    def converted(self, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        """A parameter's values as autocast converts them, once for all uses until `forget`."""
        if parameter.dtype == torch.float64:
            return parameter.detach()
        copied = self._converted.get(parameter)
        if copied is None or copied.dtype != dtype:
            copied = self._converted[parameter] = parameter.detach().to(dtype)
        return copied

    @property
    def all_converted(self) -> Collection[torch.Tensor]:
        """Return all values that `converted` has kept."""
        return self._converted.values()

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

    def put(self, product: Product, *, has_input_gradient: bool = True) -> torch.Tensor | None:
        """Take a product. A parameter with hooks needs its gradient now: then the gradient for autograd is returned.

        Args:
            product: the product of a layer.
            has_input_gradient: whether this backward also computes the gradient of the layer's input.
        """
        if product.has_hooks:
            return product.whole()
        if self._kept is None:
            product.add()
        else:
            self._kept.append(product)
        return None


class DuringSums(WeightGradients):
    """Receives the products of layers whose input's gradients are summed over ranks: it lets them wait for that sum to
    begin, so that both run together (Megatron-LM's `async_tensor_model_parallel_allreduce`).

    Args:
        gradients: the stage's, which receives the products once a sum has begun.
    """

    def __init__(self, gradients: WeightGradients) -> None:
        super().__init__()
        self._gradients, self._waiting = gradients, list[Product]()

    def converted(self, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        return self._gradients.converted(parameter, dtype)

    def put(self, product: Product, *, has_input_gradient: bool = True) -> torch.Tensor | None:
        """Take a product; where no sum follows, it does not wait."""
        if product.has_hooks or not has_input_gradient:
            return self._gradients.put(product)
        self._waiting.append(product)
        return None

    def pass_on(self) -> None:
        """Give what waits to the stage: a sum has begun."""
        waiting, self._waiting = self._waiting, []
        for product in waiting:
            self._gradients.put(product)


def kept_bytes(products: Sequence[Product]) -> int:
    """Bytes of memory that products keep; layers with the same input share its memory."""
    kept = (tensor.untyped_storage() for product in products for tensor in (product.left, product.right))
    return sum({storage_id(storage): storage.nbytes() for storage in kept}.values())
