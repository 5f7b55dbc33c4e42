"""Which keys a mini-batch may have: those that a pipeline computes with exactly as the plain model does.

A key that would be ignored, or cut into micro-batches in a wrong way, is an error.
"""

from __future__ import annotations

import inspect
from itertools import chain

from hf_gpipe.adapters.base import Adapter, Tensors
from hf_gpipe.adapters.families import UNREAD
from hf_gpipe.adapters.packing import BORDERS
from hf_gpipe.errors import DataError

#: Prefixes of the names of inputs that are not text: tensors used instead of token ids, or together with them.
_NOT_TEXT = ("inputs_embeds", "decoder_inputs_embeds", "pixel_values", "image_", "video_", "input_features", "audio_")
#: Arguments of forward that a pipeline sets itself, with the reason.
_SET_BY_PIPELINE = {
    "num_items_in_batch": "the loss is divided by the mini-batch's own number of targets",
    **dict.fromkeys(("logits_to_keep", "num_logits_to_keep"), "the loss needs the logits of every position"),
    **dict.fromkeys(
        ("cache", "past_key_values", "cache_position", "cache_params", "use_cache"), "training uses no cache"
    ),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        "a pipeline returns the loss and logits only",
    ),
    **dict.fromkeys(("head_mask", "decoder_head_mask", "cross_attn_head_mask"), "it is not for each row"),
    **dict.fromkeys(
        ("encoder_outputs", "encoder_hidden_states", "encoder_attention_mask", "cross_attention_mask"),
        "the stages make the encoder's output and its mask themselves",
    ),
}
#: Entries of a mini-batch that any loss may read. A loss says by `entries` which others it reads.
OF_LOSSES = ("labels", "shift_labels", "ref_logps")
#: Entries that say where the documents of flattened rows begin.
_OF_FLATTENED = ("position_ids", *BORDERS)


def check_keys(batch: Tensors, adapter: Adapter) -> None:
    """Raise DataError for a key of a mini-batch that the stages cannot compute with, or a mask of a wrong shape."""
    target_keys, image_keys = adapter.target_keys, adapter.image_keys  # where there are targets, there is an encoder
    model = adapter.reference
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    known = {*chain(*adapter.text_keys.values()), *BORDERS, *adapter.loss_keys, *target_keys, *image_keys}
    for name in batch:
        if name.startswith(_NOT_TEXT) and name not in image_keys:
            takes = f"takes token ids and {', '.join(image_keys)}" if image_keys else "takes token ids only"
            why = f" ({reason})" if (reason := UNREAD.get(adapter.given_config.model_type)) else ""
            raise DataError(f"the batch has {name!r}; a pipeline of {type(model).__name__} {takes}{why}")
        if reason := _SET_BY_PIPELINE.get(name):
            raise DataError(f"the batch has {name!r}, which is not supported: {reason}; leave it out")
        if target_keys and name in _OF_FLATTENED:
            raise DataError(
                f"the batch has {name!r}, as flattened rows have, and a model with an encoder cannot tell its sources "
                "and targets apart; use a collator that pads (with packing=True their padding is left out)"
            )
        if name not in known and target_keys:
            taken = ", ".join(sorted(known - {*BORDERS, *adapter.loss_keys}))
            raise DataError(f"the batch has {name!r}; a model with an encoder takes {taken} and labels; leave it out")
        if name not in known and not takes_any and name not in parameters:
            raise DataError(f"the batch has {name!r}, which {type(model).__name__}.forward does not take; leave it out")
    if "attention_mask" in batch and (borders := sorted(batch.keys() & {"cu_seq_lens_q", "cu_seq_lens_k"})):
        raise DataError(f"the batch has both {borders[0]!r} and attention_mask; leave the mask out")
    for ids, name in adapter.text_keys.values():
        mask, like = batch.get(name), batch.get(ids, batch.get("labels"))
        if mask is None or like is None:
            continue
        if mask.dim() not in (2, 4) or (mask.dim() == 2 and mask.shape != like.shape):
            raise DataError(
                f"{name} has the shape {tuple(mask.shape)} and {ids} {tuple(like.shape)}; give a mask of the same "
                "shape, or of four dimensions, which the model takes as it is"
            )
