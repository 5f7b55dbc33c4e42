"""Models that read text: their layers from the observation of a tiny clone, and token ids, masks and documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_gpipe.adapters.attention.document_positions import is_position_table
from hf_gpipe.adapters.attention.known_mask import with_known_masks
from hf_gpipe.adapters.attention.position_tables import shared_tables
from hf_gpipe.adapters.base import IGNORED_LABEL, Adapter, Inputs, Tensors
from hf_gpipe.adapters.batch_keys import OF_LOSSES, check_keys
from hf_gpipe.adapters.layers import Layer, StackName
from hf_gpipe.adapters.modules.autocast import Autocast
from hf_gpipe.adapters.modules.quantised import Quantisation
from hf_gpipe.adapters.observation.length_limit import length_limit
from hf_gpipe.adapters.observation.probe import observe_family
from hf_gpipe.adapters.observation.skeleton import Blueprint, build_skeleton, copy_with_stubs, has_closures
from hf_gpipe.adapters.packing import as_rows, is_flattened
from hf_gpipe.adapters.routers import find_routers
from hf_gpipe.adapters.stubs import EmbeddingStub, PassThrough, Port
from hf_gpipe.adapters.text_entries import IDS, MASK
from hf_gpipe.errors import DataError, UserError


class TextAdapter(Adapter):
    """A Hugging Face model that reads token ids.

    Args:
        blueprint: what the model is built from, on the meta device, which takes no memory.
        autocast: mixed precision of every forward; None: everything computes in the type of the weights.
        quantisation: how linear layers are quantised; the configuration then has no `quantization_config`.
    """

    text_keys: Mapping[StackName, tuple[str, str]] = {"decoder": (IDS, MASK)}
    #: Entries that losses alone read.
    loss_keys = (*OF_LOSSES, "row_gradients", "unit_losses")

    def __init__(
        self, blueprint: Blueprint, autocast: Autocast | None = None, quantisation: Quantisation | None = None
    ) -> None:
        self.blueprint, self.autocast, self.quantisation = blueprint, autocast, quantisation
        self.given_config, self.dtype = blueprint.config, blueprint.dtype
        self.reference = self.built()
        # The quantised layers of bitsandbytes know the modules that they belong to.
        self._is_copied = quantisation is None and not has_closures(self.reference)
        #: The text part, where the given one is of a model of images and text.
        self.config = self.reference.config
        # Top-k may break ties in another way without padding, padding takes the places of an expert, or a length must
        # be a multiple.
        padding_matters = any(
            getattr(self.config, name, 0) for name in ("index_topk", "expert_capacity", "chunk_size_feed_forward")
        )
        self.padding_matters_beyond = 0 if padding_matters else length_limit(self.config)
        # A class that is given and a class that transformers chooses share one observation.
        is_of_config = type(self.config) is type(self.given_config)
        observed = replace(blueprint, model_class=type(self.reference)) if is_of_config else blueprint
        observation = observe_family(observed, autocast)
        self.stacks = tuple(stack.of(self.reference) for stack in observation.stacks)
        stack_layers = [layer for stack in self.stacks for layer in stack.layers()]
        head = observation.head
        last = [Layer(head[-1], "head", "decoder", head)] if head else []
        self.layers: tuple[Layer, ...] = (*stack_layers, *last)
        self.projection = observation.projection
        #: Hidden states that each layer receives, by its first module; the sizes are the tiny clone's.
        self._given = {block: stack.hidden for stack in self.stacks for block in stack.blocks} | observation.inputs
        blocks = [block for stack in self.stacks for block in stack.blocks]
        self.routers = find_routers(self.reference, blocks, observation)
        self._num_block_outputs = {block: stack.num_outputs for stack in self.stacks for block in stack.blocks}
        self._embeddings = observation.embeddings
        self._embedding_tables = observation.embedding_tables
        self._constants = observation.constants
        self.kept = observation.kept
        self._encoder_dtype = observation.encoder_dtype
        self.tables = {stack.name: shared_tables(self.reference, stack.blocks) for stack in self.stacks}

    def skeleton(self, stubs: Mapping[str, nn.Module] | None = None) -> PreTrainedModel:
        if self._is_copied:
            return copy_with_stubs(self.reference, stubs or {})
        model = self.built()
        for name, stub in (stubs or {}).items():
            model.set_submodule(name, stub)
        return model

    def built(self) -> PreTrainedModel:
        """The model on the meta device, made from its configuration."""
        model = build_skeleton(self.blueprint)
        if self.quantisation is not None:
            self.quantisation.convert(model)
        return model

    @property
    def compared_class(self) -> type[PreTrainedModel] | None:
        """The class whose tiny clone shows whether the split is exact: of a classifier its family's language model."""
        return self.blueprint.model_class if self.task_type is None else None

    # ------------------------------------------------------------------ the chain

    def stub(self, layer: Layer, name: str, port: Port | None) -> nn.Module:
        if layer.kind == "block":
            return PassThrough(port, self._num_block_outputs[name])
        if name not in self._embeddings:
            return PassThrough(port)
        module = self.reference.get_submodule(name)
        own_width = getattr(module, "embedding_dim", None) or getattr(module, "out_features", None)
        width = own_width or self.stack_widths[layer.stack]
        return EmbeddingStub(width, self.dtype, is_of_positions=is_position_table(name))

    def hidden_shape(self, boundary: int, ids: torch.Tensor) -> tuple[int, ...]:
        """Shape of the hidden states that layer `boundary` receives for ids (B, T); (B, T, D) in most models."""
        return (*ids.shape, *self._given[self.layers[boundary].modules[0]].streams, self._widths[boundary])

    def carry_dtype(self, boundary: int, name: str) -> torch.dtype:
        # Observed on the tiny clone: some models keep hidden states in float32, and under autocast their type differs
        # from model to model.
        if name == "hidden":
            return self._given[self.layers[boundary].modules[0]].dtype
        if name == "encoder_hidden":
            return self._encoder_dtype or self.dtype
        return next((router.dtype for router in self.routers if router.name == name), self.dtype)

    @cached_property
    def _widths(self) -> list[int]:
        """Width of the hidden states before each layer. Cached, since it is needed for every message."""
        widths, last = [self.stack_widths[layer.stack] for layer in self.layers], self.layers[-1]
        head = self.reference.get_submodule(last.modules[0])
        if last.kind == "head" and isinstance(head, nn.Linear):
            widths[-1] = head.in_features  # OPT's `project_out` makes it narrower than the blocks
        return widths

    @cached_property
    def stack_widths(self) -> dict[StackName, int]:
        """Width of the hidden states between the blocks of each stack."""
        parts = {layer.stack: getattr(self.config, layer.stack, None) for layer in self.layers}
        configs = {stack: part if isinstance(part, PreTrainedConfig) else self.config for stack, part in parts.items()}
        return {stack: config.get_text_config().hidden_size for stack, config in configs.items()}

    # ------------------------------------------------------------------ its inputs

    @cached_property
    def num_positions(self) -> dict[StackName, int]:
        numbers: dict[StackName, int] = {}
        for layer in self.layers:
            for name in layer.modules if layer.kind == "embedding" else ():
                for path, table in self.reference.get_submodule(name).named_modules(prefix=name):
                    if path in self._embedding_tables and is_position_table(path):
                        # In some tables the first rows are not positions.
                        first = getattr(table, "offset", 0) if table.padding_idx is None else table.padding_idx + 1
                        numbers[layer.stack] = table.num_embeddings - first
        return numbers

    def check_keys(self, batch: Tensors) -> None:
        if missing := [name for name in (IDS, "labels") if name not in batch]:
            raise DataError(f"a mini-batch needs {IDS} and labels; {missing[0]!r} is missing, found {list(batch)}")
        check_keys(batch, self)
        self._check_positions(batch)
        if (shifted := batch.get("shift_labels")) is None:
            return
        if self.labels_rows or self.target_keys:
            raise DataError(
                f"the batch has 'shift_labels', which {type(self.reference).__name__} does not read; give labels"
            )
        if shifted.shape != (shape := batch[IDS].shape):
            raise DataError(f"shift_labels have the shape {tuple(shifted.shape)} and {IDS} {tuple(shape)}")

    def _check_positions(self, batch: Tensors) -> None:
        """Raise DataError where rows with positions of their own choose rotary frequencies for each other."""
        positions, limit = batch.get("position_ids"), self.padding_matters_beyond
        if positions is None or positions.dim() != 2 or not limit:
            return
        last = positions.amax(dim=1)
        if len(last) and int(last.max()) >= limit and bool((last != last[0]).any()):
            raise DataError(
                f"position_ids has rows that end at {int(last.min())} and at {int(last.max())}, and beyond {limit} "
                f"positions the rotary embeddings of {type(self.reference).__name__} follow from the longest row of a "
                "micro-batch; leave position_ids out, or use shorter rows"
            )

    def main_input(self, batch: Tensors) -> torch.Tensor:
        """Return the token ids; of a model with an encoder, the ids of the sources."""
        return batch[IDS]

    def size_of(self, batch: Tensors) -> int:
        """Tokens without padding: of the sources and the targets, which in a decoder-only model are one."""
        return num_tokens(batch, decoder_only=not self.config.is_encoder_decoder)

    with_known_masks = staticmethod(with_known_masks)
    is_flattened = staticmethod(is_flattened)
    as_rows = staticmethod(as_rows)

    def document_lengths(self, inputs: Inputs) -> dict[StackName, tuple[int, ...]]:
        masks = {stack.name: inputs.get(self.text_keys[stack.name][1]) for stack in self.stacks}
        documents = {stack: getattr(mask, "documents", None) for stack, mask in masks.items()}
        return {stack: of_stack.lengths for stack, of_stack in documents.items() if of_stack is not None}

    def _trimmed(self, group: Mapping[str, torch.Tensor], is_used: torch.Tensor) -> dict[str, torch.Tensor]:
        """Cut the columns at the end that no row of a micro-batch uses; `group` has the shape of `is_used` (B, T)."""
        if self.padding_matters_beyond is not None and is_used.shape[1] > self.padding_matters_beyond:
            return dict(group)
        used = is_used.any(dim=0).nonzero()
        length = int(used[-1]) + 1 if len(used) else 1
        return {name: tensor[:, :length] for name, tensor in group.items()}

    def check_inputs(self, inputs: Inputs) -> None:
        self.check_lengths(inputs)
        self.check_ids(inputs)

    def check_lengths(self, inputs: Inputs) -> None:
        """Raise DataError where inputs, as returned by `prepare`, are longer than the model's table of positions.

        Documents in one row may not be so long that they would choose rotary frequencies for each other.
        """
        documents, limit = self.document_lengths(inputs), self.padding_matters_beyond
        longest = max((max(lengths) for lengths in documents.values()), default=0)
        if limit and longest > limit:
            raise DataError(
                f"a document has {longest} tokens, and beyond {limit} the rotary embeddings of "
                f"{type(self.reference).__name__} follow from the longest document of a row, so rows cannot be packed; "
                "leave packing out, or use shorter documents"
            )
        for stack, most in self.num_positions.items():
            name = self.text_keys[stack][0]
            length = max(documents.get(stack, (inputs[name].shape[1],)))
            if length > most:
                raise DataError(
                    f"a row of {name} is {length} tokens long, and the {stack} has positions for {most}; cut the rows "
                    "(max_source_tokens and max_target_tokens of a recipe's data), or use a model with more positions"
                )

    def check_ids(self, inputs: Inputs) -> None:
        """Raise DataError where an input id or a label is not in the model's vocabulary; a GPU fails late."""
        tables = {IDS: self.reference.get_input_embeddings(), "labels": self.reference.get_output_embeddings()}
        tables["shift_labels"] = tables["labels"]
        for name, table in tables.items():
            if not isinstance(weight := getattr(table, "weight", None), torch.Tensor) or name not in inputs:
                continue
            ids, size = inputs[name], weight.shape[0]
            wrong = ids[((ids < 0) & (ids != IGNORED_LABEL) if name != IDS else ids < 0) | (ids >= size)]
            if wrong.numel():
                raise DataError(
                    f"{name} has {int(wrong[0])}, and the model's vocabulary has {size} tokens; use the model's own "
                    "tokenizer, or resize its embeddings"
                )


def num_tokens(batch: Tensors, decoder_only: bool) -> int:
    """Tokens of a mini-batch without padding: of the sources and, unless these are the same, of the targets."""
    mask = batch.get("attention_mask")
    # A mask of four dimensions says for each position which others it sees, not which are padding.
    sources = int(mask.bool().sum()) if mask is not None and mask.dim() == 2 else batch[IDS].numel()
    return sources if decoder_only else sources + int((batch["labels"] != IGNORED_LABEL).sum())


def check_reads_text(adapter: Adapter, what: str) -> TextAdapter:
    """The adapter. Raises UserError where `what` is asked of another model than transformers' that reads text."""
    if not isinstance(adapter, TextAdapter):
        raise UserError(
            f"{what}: {type(adapter.reference).__name__} is no Hugging Face model that reads text; leave it out"
        )
    return adapter
