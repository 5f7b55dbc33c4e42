"""Whether documents that are packed into one row keep apart in a model: a tiny clone says so before use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_gpipe.adapters import Adapter, StageModel
from hf_gpipe.adapters.attention.document_positions import is_position_table
from hf_gpipe.adapters.text import check_reads_text
from hf_gpipe.adapters.text_entries import text_entries, token_ids
from hf_gpipe.errors import UnsupportedModelError, one_line
from hf_gpipe.model.clone import Batch, clone_of, padded_batch
from hf_gpipe.model.steps import stage_models

#: The largest difference of the logits of a float32 model with and without packing, relative to their norm.
PACKING_TOLERANCE = 1e-4
#: Together longer than the tables of positions of tiny clones: only a document must not be longer.
PACKED_LENGTHS = (30, 25, 20)


def verify_packing(adapter: Adapter) -> None:
    """Compare logits of documents packed into one row with those of each document alone, on a tiny clone.

    Models with a state beside attention, such as recurrent layers, carry it from one document into the next.

    Raises:
        UnsupportedModelError: the logits differ, or the clone does not run.
        UserError: the model has attention that cannot keep documents apart.
    """
    adapter = check_reads_text(adapter, "packing=True")
    token = torch.zeros(1, dtype=torch.long)
    adapter.packed([text_entries(token, labels=token)])
    family = adapter.given_config.model_type
    try:
        model, clone = clone_of(adapter, torch.float32)
        model.eval()
        (stage,) = stage_models(model, clone, 1).values()
        stage.model.eval()
        documents = _documents(model, clone)
        with torch.no_grad():
            packed = stage(clone.packed(documents), {})["logits"]
            # Without position ids: where a model's own do not begin at 0, those of packed rows are not the rows' own.
            rows = [text_entries(token_ids(own)[None], labels=own["labels"][None]) for own in documents]
            alone = [stage(clone.with_known_masks(clone.prepare(row)), {})["logits"] for row in rows]
        depends = _depends_on_others(stage, clone.packed(documents), documents)
    except Exception as error:
        raise UnsupportedModelError(
            f"{family}: packed rows of a tiny clone fail: {one_line(str(error), 200)}"
        ) from error
    expected = torch.cat(alone, dim=1)
    difference = float((packed - expected).norm() / expected.norm())
    # Parts of a model that compute in float32 round in another way when shapes change.
    if depends or not difference <= PACKING_TOLERANCE:
        raise UnsupportedModelError(
            f"{family}: rows cannot be packed: documents in one row change each other's logits (by {difference:.0e} on "
            "a tiny clone); leave packing out, and use a collator that pads"
        )


def _depends_on_others(stage: StageModel, packed: Batch, documents: Sequence[Batch]) -> bool:
    """Whether the logits of the last document have any gradient at the embeddings of another one.

    However small the values are by which documents change each other, as under a norm with a large epsilon, this
    gradient is 0 only where nothing connects them.
    """
    embedded: list[torch.Tensor] = []

    def as_leaf(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # some models change it in place

    size = stage.model.get_input_embeddings().weight.shape[0]
    tables = [
        module
        for name, module in stage.model.named_modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings == size and not is_position_table(name)
    ]
    handles = [table.register_forward_hook(as_leaf) for table in tables]
    try:
        logits = stage(packed, {})["logits"]
    finally:
        for handle in handles:
            handle.remove()
    last = [len(values) for values in (token_ids(documents[-1]), documents[-1]["labels"])]
    logits[:, -last[1] :].square().sum().backward()
    return any(tensor.grad is not None and bool(tensor.grad[:, : -max(last)].any()) for tensor in embedded)


def _documents(model: PreTrainedModel, adapter: Adapter) -> list[Batch]:
    """Documents of unlike lengths, as of `Adapter.packed`."""
    ids = token_ids(padded_batch(model, with_images=False)).flatten().repeat(PACKED_LENGTHS[0])
    # Longer ones than the limit of rotary embeddings are not packed.
    limit = adapter.padding_matters_beyond
    lengths = [min(size, limit - place) if limit else size for place, size in enumerate(PACKED_LENGTHS)]
    sources = [ids[size : 2 * size] for size in lengths]
    if not adapter.target_keys:
        return [{"position_ids": torch.arange(len(ids)), **text_entries(ids, labels=ids)} for ids in sources]
    return [text_entries(source, labels=other) for source, other in zip(sources, reversed(sources), strict=True)]
