"""Transformers' image classifiers as chains: a tiny configuration of each, and its largest difference in stages.

`python -m tests.image_families` prints the table of docs/image_models.md.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import transformers
from torch.nn import functional as F

from hf_gpipe import Pipeline
from hf_gpipe.runtime.cutting import split_rows

_IMAGE = {"image_size": 32, "patch_size": 4}
_VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, **_IMAGE}
_SWIN = {"embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4, **_IMAGE}
_STAGES = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1], "image_size": 32}
_PYRAMID = {**_STAGES, "num_attention_heads": [1, 1, 2, 2]}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]}
_FOCAL = {"embed_dim": 16, "depths": [1, 2], "hidden_sizes": [16, 32], "focal_levels": [2, 2], "focal_windows": [3, 3]}
_LEVIT = {"hidden_sizes": [16, 24, 32], "num_attention_heads": [1, 2, 2], "depths": [1, 1, 1], "key_dim": [4, 4, 4]}
_HGNET_IN = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "stem_channels": [3, 4, 8]}
_HGNET_WIDTHS = {"stage_in_channels": [8, 8, 8, 16], "stage_mid_channels": [4, 4, 8, 8]}
_HGNET_BLOCKS = {"stage_num_blocks": [1, 1, 1, 1], "stage_numb_of_layers": [2, 2, 2, 2]}
_MOBILEVIT = {"hidden_sizes": [8, 12, 16], "neck_hidden_sizes": [4, 4, 8, 8, 12, 16, 32], "num_attention_heads": 2}
_EFFICIENT = {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320, "drop_connect_rate": 0.0}

EXACT: dict[str, dict[str, Any]] = {
    "Beit": _VIT,
    "Bit": {**_RESNET, "num_groups": 2},
    "CLIP": {"vision_config": _VIT},
    "ConvNext": _STAGES,
    "ConvNextV2": _STAGES,
    "Data2VecVision": _VIT,
    "DeiT": _VIT,
    "Dinov2": _VIT,
    "Dinov2WithRegisters": {**_VIT, "num_register_tokens": 2},
    "DonutSwin": _SWIN,
    "EfficientNet": {**_EFFICIENT, "image_size": 32},
    "FocalNet": {**_FOCAL, **_IMAGE},
    "HGNetV2": {**_HGNET_IN, **_HGNET_WIDTHS, "stage_out_channels": [8, 8, 16, 16], **_HGNET_BLOCKS},
    "IJepa": _VIT,
    "Levit": {**_LEVIT, "image_size": 64},
    "MobileNetV1": {"image_size": 32, "depth_multiplier": 0.25},
    "MobileNetV2": {"image_size": 32, "depth_multiplier": 0.25},
    "MobileViT": {**_MOBILEVIT, "image_size": 32},
    "MobileViTV2": {"image_size": 64, "width_multiplier": 0.25},
    "PoolFormer": _STAGES,
    "Pvt": _PYRAMID,
    "PvtV2": _PYRAMID,
    "RegNet": {**_RESNET, "groups_width": 4},
    "ResNet": _RESNET,
    "Segformer": _PYRAMID,
    "Siglip": {"vision_config": _VIT},
    "Swin": _SWIN,
    "Swinv2": _SWIN,
    "TextNet": {"image_size": [32, 32], "stem_out_channels": 8, "hidden_sizes": [8, 8, 8, 16, 16]},
    "ViT": _VIT,
    "ViTMSN": _VIT,
}

#: Of a family that is no chain its configuration, and where the chain breaks.
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "SwiftFormer": (
        {"image_size": 32, "embed_dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "drop_path_rate": 0.0},
        "'dist_head' reads a tensor (5, 16) of float64 of 'norm'",
    ),
}


def classifier(family: str, values: dict[str, Any]) -> Any:
    """A tiny model of a family in float64, in training, without dropout."""
    config = getattr(transformers, f"{family}Config")(num_labels=3, **values)
    for name, value in vars(config).items():
        if ("drop" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForImageClassification")(config).double().train()


def images(values: dict[str, Any], count: int = 5) -> dict[str, torch.Tensor]:
    """A mini-batch of five images, or fewer."""
    size = 64 if values.get("image_size") == 64 else 32
    pixels = torch.randn(count, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 2, 1, 1, 0][:count])}


def difference(family: str, autocast: torch.dtype | None = None) -> tuple[int, bool, float]:
    """A family's number of layers, whether it has BatchNorm, and the largest difference from the plain model.

    Two stages recompute two micro-batches, in float64, or in float32 under autocast. Differences are that of the loss,
    relative, and those of gradients, relative to the norm of the whole one.
    """
    values = EXACT[family]
    # Of one shape of micro-batches the layers are observed, and no other has to be.
    model, batch = classifier(family, values), images(values, 4)
    if autocast is not None:
        model, batch["pixel_values"] = model.float(), batch["pixel_values"].float()
    plain, expected = copy.deepcopy(model), 0.0
    for rows in split_rows(batch, 2):
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            logits = plain(pixel_values=rows["pixel_values"]).logits
            loss = F.cross_entropy(logits, rows["labels"], reduction="sum") / len(batch["labels"])
        loss.backward()
        expected += loss.item()
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    example = split_rows(batch, 2)[0]
    pipe = Pipeline(model, 2, 2, "gpipe", "stage", "count", example=example, autocast=autocast, device="cpu")
    largest = abs(pipe.train_step(batch).item() - expected) / expected
    found = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    if found.keys() != gradients.keys():
        return len(pipe.adapter.layers), False, math.inf
    norm = sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5
    largest = max([largest, *(float((found[name] - gradient).norm()) / norm for name, gradient in gradients.items())])
    normalises = any(isinstance(part, torch.nn.modules.batchnorm._BatchNorm) for part in plain.modules())
    return len(pipe.adapter.layers), normalises, largest


if __name__ == "__main__":
    print("| family | layers of the tiny model | BatchNorm | largest difference |\n|---|--:|---|--:|")
    for one in EXACT:
        layers, normalises, largest = difference(one)
        print(f"| {one} | {layers} | {'yes' if normalises else ''} | {largest:.1e} |", flush=True)
