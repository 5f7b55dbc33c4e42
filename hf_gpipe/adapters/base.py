"""A model as a chain of layers, and the description of its inputs.

`Adapter` knows the whole model without its weights: its layers, which tensors cross each boundary, which
parameters are tied. The model of one stage is made from it (see stage_model.py).

It also knows what a mini-batch is: its entries, the length of its rows, what is cut off or packed, and the targets of a
loss. So the runtime reads no entry of a mini-batch by its name, except for the labels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_gpipe.adapters.layers import Layer, Stack, StackName
from hf_gpipe.adapters.modules.autocast import Autocast
from hf_gpipe.adapters.modules.dropout import masks_of
from hf_gpipe.adapters.modules.head import FoundProjection
from hf_gpipe.adapters.modules.kept_state import Kept
from hf_gpipe.adapters.modules.patches import Patch
from hf_gpipe.adapters.modules.quantised import Quantisation
from hf_gpipe.adapters.peft import PeftAdapter
from hf_gpipe.adapters.routers import Router, RouterPort
from hf_gpipe.adapters.stubs import Port
from hf_gpipe.errors import DataError
from hf_gpipe.libraries.torch import AnyDropout

IGNORED_LABEL = -100

Tensors = Mapping[str, torch.Tensor]
#: Inputs of a model's forward: tensors in training; in generation also the cache and the other arguments of `generate`.
Inputs = Mapping[str, Any]


class StageParts(Protocol):
    """The parts of a `StageModel` that `Adapter.run` needs."""

    model: Any
    device: torch.device
    port: Port
    router_port: RouterPort
    start: int
    stop: int

    @property
    def is_last(self) -> bool: ...

    def runs(self, stack: str) -> bool: ...

    def captured(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class RowImages:
    """The images of a row of tokens, without their values.

    Attributes:
        places: the columns of the tokens that stand for the images.
        entries: the name, the shape and the name of the type of this row's share of each entry of the mini-batch;
            for whole numbers, from which shapes may follow, also the values.
    """

    places: tuple[int, ...]
    entries: tuple[tuple[str, tuple[int, ...], str, tuple[int, ...] | None], ...]


class Adapter(ABC):
    """The layers, boundaries, tied parameters and inputs of a model, known before any weight exists.

    Attributes:
        reference: the whole model on the meta device.
        layers: the chain.
        dtype: the type of the weights.
        autocast: mixed precision of every forward; None: everything computes in the type of the weights.
        quantisation: how linear layers are quantised; None: they are not.
        projection: the linear layer that makes the logits, or the reason why training needs them whole.
        config, given_config: the configuration of a Hugging Face model, and the configuration that it was made from.
        stacks, routers, tables: the stacks that the blocks of a Hugging Face model form, the routers of its experts,
            and for each stack the modules of its first block that its other blocks also use.
    """

    reference: Any
    layers: tuple[Layer, ...]
    dtype: torch.dtype
    autocast: Autocast | None = None
    quantisation: Quantisation | None = None
    projection: FoundProjection
    config: Any = None
    given_config: Any = None
    stacks: tuple[Stack, ...] = ()
    routers: tuple[Router, ...] = ()
    tables: Mapping[StackName, tuple[str, ...]] = {}

    @property
    def num_positions(self) -> Mapping[StackName, int]:
        """The number of positions, the greatest length of a text, for each stack with a table of positions."""
        return {}

    #: Names of parameters that never get a gradient.
    _constants: frozenset[str] = frozenset()

    #: The names of the token ids and of their mask, by the stack that reads them, for a model that reads text.
    text_keys: Mapping[StackName, tuple[str, str]] = {}
    #: Keys of a mini-batch that only the loss reads.
    loss_keys: tuple[str, ...] = ("labels",)
    #: Keys of a mini-batch that have a value for each token of the target, where that is another text.
    target_keys: tuple[str, ...] = ()
    #: Keys of a mini-batch for what belongs to rows beside their tokens, such as images.
    image_keys: tuple[str, ...] = ()
    #: Whether the model classifies or scores rows: its logits (B, C) are read at one token of each row.
    is_classifier = False
    #: PEFT's name of the task for which its adapters train the head too; None: they do not train it.
    task_type: str | None = None
    #: Whether a mini-batch has one label for each row, and no labels of tokens.
    labels_rows = False
    #: Whether the model makes logits. The last hidden states take their place in a model without a head.
    has_head = True
    #: Whether the last hidden states are the input of the last layer, and not its output.
    ends_with_head = True
    #: Whether the logits are scores of the targets, whatever the loss is: a row has a likelihood.
    scores_targets = True
    #: What the speed of a training is counted in.
    counted: Literal["tokens", "rows"] = "tokens"
    #: The width of mini-batches beyond which columns of padding must stay, because numbers depend on them; None: none.
    padding_matters_beyond: int | None = None
    #: What modules keep from one forward to the next, which each forward of a stage gets as in a new model.
    kept: Kept = MappingProxyType({})
    #: The position of a row's first token, where a mini-batch has no positions.
    first_position = 0
    #: Whether padding on the left predicts the same in rows that are cut; a tiny clone tells.
    padding_predicts_in_groups = False
    #: Whether a checkpoint may lack the head's weights, which are then new.
    may_lack_head = False
    #: The embedding and the head, where saved adapters have them with more tokens than the model that they belong to.
    extended: frozenset[str] = frozenset()
    #: The number of layers by which new weights of a module are divided: the layers of its stack (feed_forward.py).
    divided_by_depth: Mapping[str, int] = MappingProxyType({})
    #: Functions on modules of the model in memory that its stages run in place of the library's.
    patches: tuple[Patch, ...] = ()
    #: The PEFT adapter that alone is trained (peft_resolve.py).
    peft: PeftAdapter | None = None

    # ------------------------------------------------------------------ the chain

    @abstractmethod
    def skeleton(self, stubs: Mapping[str, nn.Module] | None = None) -> Any:
        """Return a new copy of the whole model on the meta device: its modules and names, without memory.

        Its attribute `all_tied_weights_keys` is transformers' own: alias -> the parameter that it is tied to.

        Args:
            stubs: what the copy has in place of modules, by their names.
        """

    def lay_out(self, model: PreTrainedModel) -> None:
        """Give a model on the meta device the parameters that quantisation and PEFT make in place of its own."""
        if self.quantisation is not None:
            self.quantisation.lay_out(model, "meta")
        if self.peft is not None:
            self.peft.inject(model)

    @property
    def ties(self) -> dict[str, str]:
        """Name of each tied parameter -> name of the parameter that it is tied to."""
        return dict(self.reference.all_tied_weights_keys)

    @property
    def dropout(self) -> dict[str, float]:
        """The probabilities of dropout above 0, by the names of settings of model and adapter, or of the modules."""
        if self.config is None:
            modules = self.reference.named_modules()
            masks = {name: layer.p for name, layer in modules if isinstance(layer, AnyDropout) and layer.p}
        else:
            masks = masks_of(self.config)
        return masks if self.peft is None else masks | masks_of(self.peft.config)

    def num_parameters(self, *, exclude_embeddings: bool = False) -> int:
        """The number of the model's parameters, as transformers counts them."""
        if isinstance(self.reference, PreTrainedModel):
            return self.reference.num_parameters(exclude_embeddings=exclude_embeddings)
        return sum(parameter.numel() for parameter in self.reference.parameters())

    def parameters_of(self, stages: Sequence[range]) -> tuple[int, ...]:
        """Return the number of parameters of stages, given by their layers. A tied one counts in the lowest stage."""
        sizes: dict[str, tuple[int, int]] = {}
        for name, parameter in self.reference.named_parameters(remove_duplicate=False):
            owner, layer = self.ties.get(name, name), self.layer_of(name)
            sizes[owner] = min(layer, sizes.get(owner, (layer, 0))[0]), parameter.numel()
        return tuple(sum(size for layer, size in sizes.values() if layer in stage) for stage in stages)

    def layer_of(self, parameter: str) -> int:
        """Index of the layer that a parameter or buffer belongs to.

        A parameter outside of all layers belongs to the embedding that it is tied to (an encoder-decoder's `shared`)
        or, at the root of the model, to the head that reads it (Marian's `final_logits_bias`).
        """
        module = parameter
        while "." in module:
            module = module.rpartition(".")[0]
            if (index := self._layer_of_module.get(module)) is not None:
                return index
        return 0 if "." in parameter else len(self.layers) - 1

    @cached_property
    def _layer_of_module(self) -> dict[str, int]:
        return {module: index for index, layer in enumerate(self.layers) for module in layer.all_modules}

    @abstractmethod
    def stub(self, layer: Layer, name: str, port: Port | None) -> nn.Module:
        """Return the stub that replaces module `name` of another stage's layer, which is not the head."""

    @abstractmethod
    def carry_shapes(self, boundary: int, inputs: Inputs) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that layer `boundary` receives from the layer before it."""

    @abstractmethod
    def carry_dtype(self, boundary: int, name: str) -> torch.dtype:
        """Type of a tensor that layer `boundary` receives."""

    @abstractmethod
    def sources(self, boundary: int) -> dict[str, tuple[Layer, ...]]:
        """Return the layers that the value of each tensor that layer `boundary` receives depends on."""

    @property
    def compared_class(self) -> type[PreTrainedModel] | None:
        """The class whose tiny clone shows whether the split is exact; None: the class that the auto classes choose."""
        return None

    def is_trained(self, layer: Layer, model: nn.Module) -> bool:
        """Whether a layer has a parameter that requires a gradient and can get one.

        Some parameters require a gradient and never get one, such as Marian's table of sines after loading, which is
        read without a graph. Inside of blocks every parameter counts, because there it may depend on the data whether
        it gets a gradient. So a stage may send a gradient that nobody needs, but never omits one.

        Args:
            layer: the layer.
            model: the model, or any stage of it that has the layer.
        """
        named = ((f"{m}.{name}", p) for m in layer.modules for name, p in model.get_submodule(m).named_parameters())
        return any(parameter.requires_grad and name not in self._constants for name, parameter in named)

    def wants_gradient(self, boundary: int, is_trained: Sequence[bool]) -> dict[str, bool]:
        """Return whether each tensor that layer `boundary` receives depends on a layer that is trained."""
        trained = {layer for layer, is_one in zip(self.layers, is_trained, strict=True) if is_one}
        return {name: not trained.isdisjoint(layers) for name, layers in self.sources(boundary).items()}

    @abstractmethod
    def run(self, stage: StageParts, inputs: Inputs, carry: Tensors) -> dict[str, torch.Tensor]:
        """Run a stage's layers and return what `StageModel.__call__` returns.

        A cache is used only where `inputs` has one, as in generation: `cache_argument` and `use_cache`.
        """

    def computed_once(self, stage: StageParts, inputs: Inputs) -> Inputs:
        """Return the inputs of a stage's forward, with what frozen layers compute from them alone.

        A forward that is recomputed finds these results there.
        """
        return inputs

    # ------------------------------------------------------------------ its inputs

    @abstractmethod
    def check_keys(self, batch: Tensors) -> None:
        """Raise DataError for a mini-batch that lacks an entry, or has one that the stages cannot compute with."""

    def lengths_in_rows(self, batch: Tensors) -> Mapping[str, torch.Tensor]:
        """Return the length that each row has, (N,), of each entry whose first dimension is not the row.

        Raises DataError where the entries do not match the rows.
        """
        return {}

    def row_images(self, batch: Tensors) -> RowImages | None:
        """The images of the row of a mini-batch that has the most of them; None: no row has any."""
        return None

    def with_row_images(self, inputs: Tensors, images: RowImages) -> Tensors:
        """Put these images into each row of a mini-batch of text, for the planner."""
        raise NotImplementedError(f"{type(self.reference).__name__} reads tokens alone")

    def as_rows(self, batch: Tensors) -> Tensors:
        """Return a mini-batch in which each row of every entry belongs to one example."""
        return batch

    def is_flattened(self, batch: Tensors) -> bool:
        """Whether the rows of a mini-batch on the CPU are made of documents, so that they are packed."""
        return False

    def main_input(self, batch: Tensors) -> torch.Tensor:
        """The entry of a mini-batch that the model reads first, such as token ids or pixels."""
        named = [name for name in batch if name == getattr(self.reference, "main_input_name", None)]
        return batch[next(iter(named), None) or next(name for name in batch if name not in self.loss_keys)]

    @abstractmethod
    def size_of(self, batch: Tensors) -> int:
        """Return the size of a mini-batch, in tokens or rows as `counted` says."""

    @abstractmethod
    def row_lengths(self, batch: Tensors) -> torch.Tensor:
        """Length of each row of a mini-batch, (N,), by which rows are sorted and shared out."""

    def prepare(self, micro_batch: Tensors) -> dict[str, torch.Tensor]:
        """Return the inputs of a micro-batch's forward, the same on every stage, from the tensors of the collator.

        Columns of padding at the end are cut off, unless the family's results could depend on them.
        """
        return dict(micro_batch)

    def with_known_masks(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Prepared inputs on the CPU, with masks of which transformers need not ask the device whether they pad."""
        return dict(inputs)

    def packed(self, documents: Sequence[Tensors], *, is_compiled: bool = False) -> dict[str, torch.Tensor]:
        """Return the inputs of a micro-batch's forward in which documents stand one after the other in one row.

        Args:
            documents: the tensors of each document, on the CPU. A decoder-only model has input_ids, labels and
                position_ids (T,); an encoder-decoder input_ids (S,), labels and perhaps decoder_input_ids (T,).
            is_compiled: whether the blocks are compiled by torch.compile.

        Raises:
            UserError: the model cannot keep documents apart.
        """
        raise NotImplementedError(f"{type(self.reference).__name__} reads no documents")

    @abstractmethod
    def check_inputs(self, inputs: Inputs) -> None:
        """Raise DataError where inputs, as returned by `prepare`, have values that a GPU would fail on late."""

    def check_classes(self, inputs: Inputs) -> None:
        """Raise DataError where labels, on the CPU, are no classes or tokens, which the loss needs."""
        labels = inputs["labels"]
        if labels.dtype not in (torch.int32, torch.int64):
            raise DataError(
                f"labels have the type {labels.dtype}, and the loss needs classes or tokens, which are int64; "
                "give loss=LogitsLoss(function), or such labels"
            )

    def no_targets(self, batch: Tensors, *, reads_logits: bool) -> torch.Tensor:
        """Return placeholder labels for a mini-batch without labels, from which no loss is computed.

        Raises DataError where the logits depend on labels, and `reads_logits` says that logits are wanted.
        """
        raise DataError(
            f"a mini-batch has no 'labels', only {', '.join(batch)}; {type(self.reference).__name__} predicts nothing "
            "without them"
        )

    def document_lengths(self, inputs: Inputs) -> dict[StackName, tuple[int, ...]]:
        """Return the number of tokens of each document of a packed micro-batch, for each stack; empty for rows."""
        return {}

    @abstractmethod
    def targets(self, inputs: Tensors) -> torch.Tensor:
        """Labels (B, T) aligned with the logits (B, T, V); positions without a target are -100.

        Where labels are no classes, the targets are zeros (B, 1), which count the rows.
        """
