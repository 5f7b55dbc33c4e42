"""Whether the rows of a model can be cut into chunks of tokens: a tiny clone says so before use."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.text import TextAdapter, check_reads_text
from hf_gpipe.errors import UnsupportedModelError, one_line
from hf_gpipe.model.clone import Batch, attention_of, clone_of, narrowed, padded_batch
from hf_gpipe.model.exactness import compared_once
from hf_gpipe.model.steps import plain_step, split_step
from hf_gpipe.runtime.chunks import SETTING
from hf_gpipe.settings.chunks import Chunks

_CHUNKS, _STAGES = Chunks(3), 2
#: The largest difference of a clone. Parts that the library computes in float32, such as the softmax of eager
#: attention, round in another way when shapes change; a wrong model differs by 1e-3 and more.
_TOLERANCE = 1e-5


def verify_chunks(adapter: Adapter, *, packing: bool = False, recomputes_blocks: bool = False) -> None:
    """Compare a tiny clone whose rows are cut into chunks with the plain clone, once for equal clones.

    A model with a state beside keys and values, or whose tokens attend to later ones, cannot be cut so.

    Args:
        adapter: the model's, which then takes rows whose first token is predicted by padding on their left if the clone
            does.
        packing: whether documents are packed into the rows; then with the clone whose packed rows are whole.
        recomputes_blocks: whether transformers runs the blocks again in backward.

    Raises:
        UnsupportedModelError: loss or gradients differ, or the clone does not run.
    """
    adapter = check_reads_text(adapter, SETTING)
    what = f"in chunks {attention_of(adapter)} {packing} {recomputes_blocks}"
    padding_predicts = compared_once(adapter, what, lambda: _padding_predicts(adapter, packing, recomputes_blocks))
    adapter.padding_predicts_in_chunks |= padding_predicts


def _padding_predicts(adapter: TextAdapter, packing: bool, recomputes_blocks: bool) -> bool:
    """Whether padding on the left of rows predicts the same with chunks as without.

    Raises UnsupportedModelError where rows that are padded on the right differ.
    """
    family = adapter.given_config.model_type
    how = (
        "packed " * packing
        + "rows cut into chunks"
        + " whose blocks are recomputed (recompute: block)" * recomputes_blocks
    )
    try:
        model, clone = clone_of(adapter, torch.float64)
        # Documents of a row may not be longer than the limit of its rotary embeddings; rows alone may.
        batch = narrowed(padded_batch(model, with_images=False), packing and clone.padding_matters_beyond)
        options = {"packing": packing, "recomputes_blocks": recomputes_blocks}
        difference = _difference(model, clone, batch, **options)
        clone.padding_predicts_in_chunks = True
        on_the_left = {name: tensor.flip(1) for name, tensor in batch.items()}
        predicts = not packing and _difference(model, clone, on_the_left, **options) <= _TOLERANCE
    except Exception as error:
        reason = one_line(str(error), 200)
        message = f"{family}: {how} fail on a tiny clone: {reason}; leave {SETTING} out"
        raise UnsupportedModelError(message) from error
    if not difference <= _TOLERANCE:
        raise UnsupportedModelError(
            f"{family}: {how} give other gradients (by {difference:.0e} on a tiny clone): its layers keep more of "
            f"earlier tokens than keys and values, or attend to later ones; leave {SETTING} out"
        )
    return predicts


def _difference(
    model: PreTrainedModel, clone: TextAdapter, batch: Batch, *, packing: bool, recomputes_blocks: bool
) -> float:
    """How far the clone's step with chunks is from that without."""
    whole = split_step(model, clone, batch, 1, packing=True) if packing else plain_step(model, batch, clone)
    model.zero_grad()
    num_stages = min(_STAGES, len(clone.layers))
    recompute = "block" if recomputes_blocks else "stage"
    step = split_step(model, clone, batch, num_stages, chunks=_CHUNKS, packing=packing, recompute=recompute)
    return step.difference(whole)
