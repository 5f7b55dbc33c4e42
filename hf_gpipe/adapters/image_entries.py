"""The entries of a mini-batch that have images: which row each image belongs to, so that rows can be cut.

The processors of transformers give a mini-batch the images of all its rows one after the other, or of each row as many
as the row with the most. Where an image is read a row has a run of image tokens, so these tell whose it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_gpipe.adapters.base import Tensors
from hf_gpipe.errors import DataError


class ImageEntries(ABC):
    """The entries of one form of images. `pixel_values` is among them, and is missing where no row has an image."""

    #: Names of all entries.
    names: tuple[str, ...]

    @abstractmethod
    def lengths(self, batch: Tensors, num_tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the length that each row has, (N,), of each entry whose first dimension is not the row.

        Args:
            batch: the mini-batch.
            num_tokens: the number of image tokens of each row, (N,).

        Raises:
            DataError: the images do not match the image tokens.
        """

    @abstractmethod
    def example(self, config: PreTrainedConfig, num_images: Sequence[int]) -> dict[str, torch.Tensor]:
        """Entries of rows that have so many images of the smallest size, with pixels drawn by torch's generator."""


class ImagesInOrder(ImageEntries):
    """`pixel_values` (images, C, H, W): all images have as many tokens."""

    names = ("pixel_values",)

    def lengths(self, batch: Tensors, num_tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        count, total = len(batch["pixel_values"]), int(num_tokens.sum())
        of_each = total // max(count, 1)
        if total != of_each * count or not of_each or bool((num_tokens % of_each).any()):
            raise DataError(
                f"pixel_values has {count} images, and the rows have {num_tokens.tolist()} image tokens, which are not "
                "those of whole images; let the model's processor make both"
            )
        return {"pixel_values": num_tokens // of_each}

    def example(self, config: PreTrainedConfig, num_images: Sequence[int]) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.randn(sum(num_images), *_shape_of(config))}


class ImagesOfGrids(ImageEntries):
    """`image_grid_thw` (images, 3), and `pixel_values` (patches, ...) with the patches of all images."""

    names = ("pixel_values", "image_grid_thw")

    def lengths(self, batch: Tensors, num_tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        if (grids := batch.get("image_grid_thw")) is None:
            raise DataError("a mini-batch has pixel_values and no image_grid_thw; let the model's processor make both")
        patches, total = grids.prod(dim=1), int(num_tokens.sum())
        merged = int(patches.sum()) // max(total, 1)
        ends = patches.cumsum(0)
        borders = num_tokens.cumsum(0) * merged
        images = (ends[None, :] <= borders[:, None]).sum(dim=1)
        whole = torch.cat([ends.new_zeros(1), ends])[images]
        if int(ends[-1]) != total * merged or len(batch["pixel_values"]) != total * merged or (whole != borders).any():
            raise DataError(
                f"pixel_values has {len(batch['pixel_values'])} patches, image_grid_thw {patches.tolist()}, and the "
                f"rows have {num_tokens.tolist()} image tokens, which do not belong together; let the model's "
                "processor make all"
            )
        return {
            "pixel_values": num_tokens * merged,
            "image_grid_thw": images.diff(prepend=images.new_zeros(1)),
        }

    def example(self, config: PreTrainedConfig, num_images: Sequence[int]) -> dict[str, torch.Tensor]:
        vision = config.vision_config
        side = 2 * vision.spatial_merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        # The shapes differ, so that no image passes for another.
        grids = torch.tensor([(1, side, side // 2 * (1 + number % 2)) for number in range(sum(num_images))])
        return {"pixel_values": torch.randn(int(grids.prod(dim=1).sum()), width), "image_grid_thw": grids}


class ImagesOfRows(ImageEntries):
    """`pixel_values` (N, images, C, H, W), where a row has fewer images zeros, and `pixel_attention_mask`."""

    names = ("pixel_values", "pixel_attention_mask")

    def lengths(self, batch: Tensors, num_tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        has_images = batch["pixel_values"].flatten(1).any(dim=1)
        if (has_images != (num_tokens > 0)).any():
            raise DataError(
                f"the rows have {num_tokens.tolist()} image tokens, and those with images are "
                f"{has_images.nonzero().flatten().tolist()}; let the model's processor make both"
            )
        return {}

    def example(self, config: PreTrainedConfig, num_images: Sequence[int]) -> dict[str, torch.Tensor]:
        channels, height, width = _shape_of(config)
        pixels = torch.zeros(len(num_images), max(num_images), channels, height, width)
        mask = torch.zeros(len(num_images), max(num_images), height, width, dtype=torch.long)
        for row, count in enumerate(num_images):
            pixels[row, :count] = torch.randn(count, channels, height, width)
            mask[row, :count] = 1
        return {"pixel_values": pixels, "pixel_attention_mask": mask}


def _shape_of(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Return the shape (C, H, W) of an image."""
    vision: Any = config.vision_config
    size = vision.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return getattr(vision, "num_channels", 3), height, width
