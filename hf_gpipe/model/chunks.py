"""Whether the rows of a model can be cut into chunks of tokens: a tiny clone says so before use."""

from __future__ import annotations

import torch

from hf_gpipe.adapters import build_adapter
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.adapters.tiny import tiny_config
from hf_gpipe.errors import UnsupportedModelError, one_line
from hf_gpipe.model.exactness import exact_clone, padded_batch, plain_step, split_step

_CHUNKS, _STAGES = 3, 2
#: The largest difference of a clone. Parts that the library computes in float32, such as the softmax of eager
#: attention, round in another way when shapes change; a wrong model differs by 1e-3 and more.
_TOLERANCE = 1e-5
#: Of clones that were compared in this process the reason why their rows cannot be cut.
_verified: dict[str, str | None] = {}


def verify_chunks(adapter: TextAdapter, *, recomputes_blocks: bool = False) -> None:
    """Compare a tiny clone whose rows are cut into chunks with the plain clone.

    A model with a state beside keys and values, or whose tokens attend to later ones, cannot be cut so.

    Args:
        adapter: the model's.
        recomputes_blocks: whether transformers runs the blocks again in backward.

    Raises:
        UnsupportedModelError: loss or gradients differ, or the clone does not run.
    """
    attention = "sdpa" if adapter.reference.config._attn_implementation == "sdpa" else "eager"
    tiny = tiny_config(adapter.given_config).to_json_string(use_diff=False)
    identity = f"{adapter.model_class} {adapter.trust_remote_code} {attention} {recomputes_blocks} {tiny}"
    if identity not in _verified:
        _verified[identity] = _reason(adapter, attention, recomputes_blocks)
    if (reason := _verified[identity]) is not None:
        raise UnsupportedModelError(f"{adapter.given_config.model_type}: {reason}; leave sequence_chunks out")


def _reason(adapter: TextAdapter, attention: str, recomputes_blocks: bool) -> str | None:
    """Why rows cannot be cut; None: they can."""
    how = "rows cut into chunks" + " whose blocks are recomputed (recompute: block)" * recomputes_blocks
    try:
        options = {"trust_remote_code": adapter.trust_remote_code}
        model = exact_clone(adapter.given_config, torch.float64, adapter.model_class, **options)
        model.set_attn_implementation(attention)
        clone = build_adapter(model.config, torch.float64, attention, type(model))
        batch = padded_batch(model)
        expected = plain_step(model, batch, clone.prepare)
        model.zero_grad()
        stages = min(_STAGES, len(clone.layers))
        step = split_step(model, clone, batch, stages, chunks=_CHUNKS, recomputes_blocks=recomputes_blocks)
    except Exception as error:
        return f"{how} fail on a tiny clone: {one_line(str(error), 200)}"
    difference = step.difference(expected)
    if difference <= _TOLERANCE:
        return None
    return (
        f"{how} give other gradients (by {difference:.0e} on a tiny clone): its layers keep more of earlier tokens "
        "than keys and values, or attend to later ones"
    )
