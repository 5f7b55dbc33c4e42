"""Models of images and text: a vision tower and a projector before a decoder, whose features replace image tokens.

The tower with the projector is the first layer. What it sends are the features of a micro-batch's image tokens, and the
next layer, the table of tokens, puts them in the places of these tokens. A micro-batch without images sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hf_gpipe.adapters.base import IGNORED_LABEL, Inputs, RowImages, StageParts, Tensors
from hf_gpipe.adapters.decoder_only import DecoderOnly
from hf_gpipe.adapters.image_entries import ImageEntries, ImagesInOrder, ImagesOfGrids, ImagesOfRows
from hf_gpipe.adapters.layers import Layer
from hf_gpipe.adapters.observation.skeleton import Blueprint
from hf_gpipe.adapters.text_entries import text_entries, token_ids
from hf_gpipe.errors import DataError, UnsupportedModelError
from hf_gpipe.libraries.transformers import attention_implementation

#: The form of the images by model_type, for the families whose features come from one forward of the tower.
FORMS: Mapping[str, ImageEntries] = {
    **dict.fromkeys(("aya_vision", "cohere2_vision", "deepseek_vl", "gemma3", "got_ocr2"), ImagesInOrder()),
    **dict.fromkeys(("internvl", "janus", "llava", "paligemma", "vipllava"), ImagesInOrder()),
    **dict.fromkeys(("exaone4_5", "qwen2_vl", "qwen2_5_vl"), ImagesOfGrids()),
    **dict.fromkeys(("idefics2", "idefics3", "smolvlm"), ImagesOfRows()),
}
#: Families whose positions begin with 1.
_FROM_ONE = ("paligemma",)
#: Families whose image token may be outside of the vocabulary.
_OUTSIDE = ("gemma3", "paligemma")
#: Entries that a stage adds to its inputs: what the first modules of the tower gave, and the features.
_OUTPUT, _FEATURES = "output of the tower", "features of the images"


class ImageText(DecoderOnly):
    """Llava and similar models: vision tower and projector, embedding, blocks, norm, head."""

    def __init__(self, blueprint: Blueprint, *options: Any) -> None:
        super().__init__(blueprint, *options)
        family = blueprint.config.model_type
        self.images = FORMS[family]
        self.first_position = int(family in _FROM_ONE)
        self.image_keys = self.images.names
        blocks = [self.reference.get_submodule(name) for stack in self.stacks for name in stack.blocks]
        is_causal = all(getattr(module, "is_causal", True) for block in blocks for module in block.modules())
        if not is_causal and attention_implementation(self.config) == "sdpa":
            # PaliGemma's attention sees later tokens where sdpa gets no mask: in rows without padding and types.
            self.padding_matters_beyond = 0
        first = self.layers[0]
        if not first.idle:
            raise UnsupportedModelError(f"{family}: no module is read for images alone")
        #: The modules that read images, in their order.
        self.tower = first.idle
        self.layers = (
            Layer(self.tower[0], "vision", "decoder", self.tower),
            Layer(first.name, first.kind, first.stack, first.modules),
            *self.layers[1:],
        )
        prefixes = tuple(f"{name}." for name in self.tower)
        # They were observed without images.
        self._constants = frozenset(name for name in self._constants if not name.startswith(prefixes))

    # ------------------------------------------------------------------ its inputs

    def reads(self, batch: Mapping[str, Any]) -> bool:
        """Whether a mini-batch, or a micro-batch, has images."""
        return "pixel_values" in batch or _FEATURES in batch or _OUTPUT in batch

    def lengths_in_rows(self, batch: Tensors) -> dict[str, torch.Tensor]:
        if not self.reads(batch):
            return {}
        return _lengths(self.config, batch)

    def row_images(self, batch: Tensors) -> RowImages | None:
        return images_of_row(self.config, batch) if self.reads(batch) else None

    def with_row_images(self, inputs: Tensors, images: RowImages) -> Tensors:
        ids = self.main_input(inputs).clone()
        ids[:, images.places] = self.config.image_token_id
        with_images = {**inputs, **text_entries(ids)}
        for name, shape, named, values in images.entries:
            dtype = getattr(torch, named)
            share = torch.ones(shape, dtype=dtype) if values is None else torch.tensor(values, dtype=dtype).view(shape)
            with_images[name] = share.repeat(len(ids), *[1] * (len(shape) - 1))
        if "mm_token_type_ids" in signature(self.reference.forward).parameters:
            with_images["mm_token_type_ids"] = (ids == self.config.image_token_id).long()
        return with_images

    def prepare(self, micro_batch: Tensors) -> dict[str, torch.Tensor]:
        inputs = super().prepare(micro_batch)
        if not self.reads(inputs):
            return inputs
        if not bool((self.main_input(inputs) == self.config.image_token_id).any()):
            return {name: tensor for name, tensor in inputs.items() if name not in self.images.names}
        model = self.reference.model
        if hasattr(model, "get_rope_index") and "position_ids" not in inputs:
            # Here, where reading the sizes of images makes no device wait.
            names = ("attention_mask", "mm_token_type_ids", "image_grid_thw")
            if "mm_token_type_ids" not in inputs:
                raise DataError("a mini-batch with images needs mm_token_type_ids, which the model's processor makes")
            given = {name: inputs[name] for name in names if name in inputs}
            inputs["position_ids"] = model.get_rope_index(self.main_input(inputs), **given)[0]
        return inputs

    def check_ids(self, inputs: Inputs) -> None:
        if self.config.model_type in _OUTSIDE:
            ids = self.main_input(inputs)
            inputs = {**inputs, **text_entries(ids.masked_fill(ids == self.config.image_token_id, 0))}
        super().check_ids(inputs)

    # ------------------------------------------------------------------ the chain

    def carry_shapes(self, boundary: int, inputs: Inputs) -> dict[str, tuple[int, ...]]:
        if boundary != 1:
            return super().carry_shapes(boundary, inputs)
        if not self.reads(inputs):
            return {}
        # On the CPU, where the micro-batches are made.
        num_tokens = int((self.main_input(inputs) == self.config.image_token_id).sum())
        return {"images": (num_tokens, self.stack_widths["decoder"])}

    def sources(self, boundary: int) -> dict[str, tuple[Layer, ...]]:
        return {"images": self.layers[:1]} if boundary == 1 else super().sources(boundary)

    def run(self, stage: StageParts, inputs: Inputs, carry: Tensors) -> dict[str, torch.Tensor]:
        features = carry.get("images")
        if stage.start == 0 and self.reads(inputs):
            features = self._features(stage.model, inputs)
        if stage.stop == 1:
            return {} if features is None else {"images": features}
        inputs = {name: value for name, value in inputs.items() if name not in (_OUTPUT, _FEATURES)}
        if features is None:
            inputs = {name: value for name, value in inputs.items() if name not in self.images.names}
            return super().run(stage, inputs, carry)
        # With a dimension for tokens, which smolvlm of transformers 5.17 reads: here each image has one token.
        made = BaseModelOutputWithPooling(pooler_output=_Pieces((features[:, None],)))
        with _replaced(stage.model.model, "get_image_features", lambda *args, **kwargs: made):
            return super().run(stage, inputs, carry)

    def computed_once(self, stage: StageParts, inputs: Inputs) -> Inputs:
        if stage.start or not self.reads(inputs):
            return inputs
        towers = [stage.model.get_submodule(name) for name in self.tower]
        frozen = [not any(p.requires_grad for p in tower.parameters()) for tower in towers]
        if all(frozen):
            return {**inputs, _FEATURES: self._features(stage.model, inputs)}
        if not frozen[0]:
            return inputs
        outputs: list[Any] = []

        def keep(_: nn.Module, args: Any, output: Any) -> None:
            outputs.append(output)
            raise _EnoughError

        handle = towers[0].register_forward_hook(keep)
        try:
            self._features(stage.model, inputs)
        except _EnoughError:
            pass
        finally:
            handle.remove()
        return {**inputs, _OUTPUT: outputs[0]}

    def _features(self, model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
        """The features of all image tokens (tokens, D), one after the other."""
        if _FEATURES in inputs:
            features: torch.Tensor = inputs[_FEATURES]
            return features
        given = {
            name: inputs[name].to(self.dtype) if inputs[name].is_floating_point() else inputs[name]
            for name in self.images.names
            if name in inputs
        }
        if _OUTPUT in inputs:
            with _replaced(model.get_submodule(self.tower[0]), "forward", lambda *args, **kwargs: inputs[_OUTPUT]):
                output = model.model.get_image_features(**given, return_dict=True)
        else:
            output = model.model.get_image_features(**given, return_dict=True)
        pooled = output.pooler_output
        features = torch.cat(tuple(pooled)) if isinstance(pooled, list | tuple) else pooled
        # The type of the embeddings, to which the model converts them.
        return features.reshape(-1, features.shape[-1]).to(self.dtype)


def _lengths(config: PreTrainedConfig, batch: Tensors) -> dict[str, torch.Tensor]:
    """Do what `Adapter.lengths_in_rows` does, for a mini-batch with images."""
    return FORMS[config.model_type].lengths(batch, (token_ids(batch) == config.image_token_id).sum(dim=1))


def images_of_row(config: PreTrainedConfig, batch: Tensors) -> RowImages:
    """Do what `Adapter.row_images` does, for a mini-batch with images and a model of this configuration."""
    is_image, lengths = token_ids(batch) == config.image_token_id, _lengths(config, batch)
    row = int(is_image.sum(dim=1).argmax())
    shares = {
        name: batch[name].split(lengths[name].tolist())[row] if name in lengths else batch[name][row : row + 1]
        for name in FORMS[config.model_type].names
        if name in batch
    }
    entries = []
    for name, share in shares.items():
        values = None if share.is_floating_point() else tuple(share.flatten().tolist())
        entries.append((name, tuple(share.shape), str(share.dtype).removeprefix("torch."), values))
    return RowImages(tuple(is_image[row].nonzero().flatten().tolist()), tuple(entries))


def example_batch(model: PreTrainedModel, num_images: Sequence[int]) -> dict[str, torch.Tensor]:
    """A mini-batch of rows with so many images of the smallest size, and tokens drawn by torch's generator.

    Args:
        model: a model of images and text, in memory.
        num_images: the number of images of each row.
    """
    config, text = model.config, model.config.get_text_config()
    entries = FORMS[config.model_type].example(config, num_images)
    token: int = config.image_token_id
    pixels = {
        name: values.to(model.dtype) if values.is_floating_point() else values for name, values in entries.items()
    }
    vocabulary = min(token, text.vocab_size) - 1
    rows = [torch.randint(3, vocabulary, (5 - row % 3,)) for row in range(len(num_images))]
    if sum(num_images):
        with torch.no_grad():
            pooled = model.model.get_image_features(**pixels, return_dict=True).pooler_output
        # The number of features of each image; in some models all images of a row are one tensor.
        sizes = [features.shape[:-1].numel() for features in pooled] if isinstance(pooled, list | tuple) else []
        if len(sizes) != sum(num_images):
            sizes = [sum(sizes or [pooled.shape[:-1].numel()]) // sum(num_images)] * sum(num_images)
        images = iter(sizes)
        for row, count in enumerate(num_images):
            for _ in range(count):
                rows[row] = torch.cat([rows[row][:1], torch.full((next(images),), token), rows[row]])
    most = max(map(len, rows))
    for row, tokens in enumerate(rows):
        # The rows have little padding: eager attention may give NaN for columns that no token sees.
        more = max(most - row % 3 - len(tokens), 0)
        rows[row] = torch.cat([tokens, torch.randint(3, vocabulary, (more,))])
    ids = torch.stack([F.pad(row, (0, most - len(row))) for row in rows])
    mask = torch.stack([torch.arange(most) < len(row) for row in rows]).long()
    batch = text_entries(ids, mask, ids.masked_fill((mask == 0) | (ids == token), IGNORED_LABEL))
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in signature(model.forward).parameters:
            batch[name] = (ids == token).long()
    return batch | (pixels if sum(num_images) else {})


class _Pieces(tuple[torch.Tensor, ...]):
    """Features as a model's forward reads them: some models take a tuple, others one tensor."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self[0], name)


class _EnoughError(Exception):
    """Ends a forward of which only the first part is wanted."""


@contextmanager
def _replaced(module: nn.Module, name: str, function: Any) -> Iterator[None]:
    """Context manager in which a method of this one module is another function."""
    vars(module)[name] = function
    try:
        yield
    finally:
        del vars(module)[name]
