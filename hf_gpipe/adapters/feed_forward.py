"""Depth-scaled feed-forward initialisation: GPipe's first measure for the stability of deep Transformers.

The paper scales the initial weights of the feed-forward layers down by the number of layers (arXiv 1811.06965,
section 5, after Zhang et al. 2019) and gives no formula. Here the family's initial weights of the last projection of
each feed-forward block are multiplied by 1/L, L being the number of layers of its stack, encoder or decoder. At the
start of training each block then adds 1/L of what it would have added to the hidden states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_gpipe.errors import UnsupportedModelError

if TYPE_CHECKING:
    from hf_gpipe.adapters.base import Adapter
    from hf_gpipe.adapters.stage_model import StageModel

#: End of the name of a block's last feed-forward projection -> the families that use this name. Families whose blocks
#: normalise the output of their feed-forward layers are left out, because the norm would undo the scale.
_OUTPUTS: dict[str, tuple[str, ...]] = {
    "DenseReluDense.wo": ("t5", "mt5", "umt5", "longt5"),
    "fc2": (
        *("bart", "mbart", "marian", "m2m_100", "pegasus", "plbart", "mvp", "blenderbot", "blenderbot-small"),
        *("opt", "xglm", "biogpt"),
    ),
    "mlp.down_proj": (
        *("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "cohere", "granite", "smollm3", "olmo"),
        *("seed_oss", "stablelm", "phi3"),
    ),
    "mlp.c_proj": ("gpt2", "gpt_bigcode", "gpt_neo", "starcoder2"),
    "mlp.dense_4h_to_h": ("gpt_neox", "bloom", "falcon"),
    "mlp.fc2": ("phi",),
    "mlp.fc_out": ("gptj", "codegen"),
}

OUTPUT_OF = {family: name for name, families in _OUTPUTS.items() for family in families}
"""Model type -> end of the name of the last projection of each block's feed-forward layers."""


def feed_forward_outputs(adapter: Adapter) -> dict[str, int]:
    """Name of each block's last feed-forward projection -> L, the number of blocks in its stack.

    Raises UnsupportedModelError for a family that is not in OUTPUT_OF, or a block without exactly one such module.
    """
    family = adapter.config.model_type
    if family not in OUTPUT_OF:
        raise UnsupportedModelError(
            f"depth_scaled_feed_forward: for the family {family!r} it is not known which weights to scale; leave it "
            f"out, or use one of {', '.join(OUTPUT_OF)}"
        )
    num_layers_of: dict[str, int] = {}
    for stack in adapter.stacks:
        for block in stack.blocks:
            names = [name for name, _ in adapter.reference.get_submodule(block).named_modules()]
            outputs = [name for name in names if f".{name}".endswith(f".{OUTPUT_OF[family]}")]
            if len(outputs) != 1:
                raise UnsupportedModelError(
                    f"depth_scaled_feed_forward: {block} of this {family} model has {len(outputs)} modules called "
                    f"{OUTPUT_OF[family]}, and 1 is expected; leave it out"
                )
            num_layers_of[f"{block}.{outputs[0]}"] = len(stack.blocks)
    return num_layers_of


def divide_by_depth(stage: StageModel) -> None:
    """Divide weight and bias of each of a stage's modules in `divided_by_depth` by the layers of its stack.

    Must be called after the stage was initialised and before `StageModel.seal`.
    """
    own = tuple(f"{layer.name}." for layer in stage.layers if layer.kind == "block")
    with torch.no_grad():
        for name, num_layers in stage.adapter.divided_by_depth.items():
            if name.startswith(own):
                for parameter in stage.model.get_submodule(name).parameters():
                    parameter.div_(num_layers)
