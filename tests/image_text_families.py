"""Tiny models of images and text, their mini-batches, and the plain model looped over the same micro-batches."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_gpipe.adapters.image_text import example_batch
from hf_gpipe.model.clone import exact_clone
from tests.oracle import Batch, Result

FAMILIES = (
    *("aya_vision", "cohere2_vision", "deepseek_vl", "exaone4_5", "gemma3", "got_ocr2", "idefics2", "idefics3"),
    *("internvl", "janus", "llava", "paligemma", "qwen2_5_vl", "qwen2_vl", "smolvlm", "vipllava"),
)
#: Images of each row: several in one, rows without any, and with M = 3 or 4 micro-batches without any.
NUM_IMAGES = (2, 0, 1, 1, 0, 0)


def clone(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A tiny model with eager attention, in training mode."""
    return exact_clone(CONFIG_MAPPING[family](), dtype)


def batch_of(model: PreTrainedModel, num_images: tuple[int, ...] = NUM_IMAGES, seed: int = 0) -> Batch:
    """Rows with so many images, whose prefix PaliGemma reads in both directions."""
    torch.manual_seed(seed)
    batch = example_batch(model, num_images)
    if model.config.model_type == "paligemma":
        columns = torch.arange(batch["input_ids"].shape[1])
        batch["token_type_ids"] = (columns >= columns[-1] - 2).long().expand_as(batch["input_ids"]).contiguous()
    return batch


def parts_of(batch: Batch, num_images: tuple[int, ...], num_micro_batches: int) -> list[Batch]:
    """The micro-batches, each with its own images, and those without images without any entry of images.

    Columns that only pad are cut off, for parts of Gemma 3 compute in float32, and round in another way with them.
    """
    images = torch.tensor(num_images)
    first = F.pad(images.cumsum(0), (1, 0))
    parts = []
    for rows in torch.arange(len(images)).tensor_split(num_micro_batches):
        begin, end = int(first[rows[0]]), int(first[rows[-1] + 1])
        part: Batch = {}
        for name, tensor in batch.items():
            if name == "image_grid_thw" or (name == "pixel_values" and tensor.dim() == 4):
                part[name] = tensor[begin:end]
            elif name == "pixel_values" and tensor.dim() == 2:
                patches = F.pad(batch["image_grid_thw"].prod(dim=1).cumsum(0), (1, 0))
                part[name] = tensor[int(patches[begin]) : int(patches[end])]
            else:
                part[name] = tensor[rows]
        most = int(part["attention_mask"].sum(dim=1).max())
        part |= {name: part[name][:, :most] for name in part if part[name].shape == part["attention_mask"].shape}
        pixels = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
        parts.append(part if begin < end else {n: t for n, t in part.items() if n not in pixels})
    return parts


def run_plain(model: PreTrainedModel, parts: list[Batch]) -> Result:
    """Loss summed over target tokens, divided by the mini-batch's count, micro-batch after micro-batch."""
    model.zero_grad()
    total, count = 0.0, sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
    for part in parts:
        inputs = {name: tensor for name, tensor in part.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), part["labels"][:, 1:].flatten(), reduction="sum") / count
        loss.backward()
        total += loss.item()
    return Result(total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
