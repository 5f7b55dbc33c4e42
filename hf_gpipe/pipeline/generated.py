"""Whether a model generates in stages what it generates whole: a tiny clone says so where that is not known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_gpipe.adapters import unsupported
from hf_gpipe.adapters.modules.kept_state import KeptState
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.adapters.text_entries import text_entries, token_ids
from hf_gpipe.errors import one_line
from hf_gpipe.libraries.verified import unverified
from hf_gpipe.model.clone import clone_of, compared_once, padded_batch
from hf_gpipe.pipeline.clone_steps import in_stages
from hf_gpipe.pipeline.variant import Variant

_NEW_TOKENS = 5
#: The largest difference of the logits of a float32 model, relative to their norm.
_TOLERANCE = 1e-4
_OPTIONS = {
    **{"max_new_tokens": _NEW_TOKENS, "min_new_tokens": _NEW_TOKENS, "do_sample": False},
    **{"return_dict_in_generate": True, "output_logits": True},
}
_METHODS: tuple[Mapping[str, Any], ...] = ({}, {"num_beams": 2})


def verify_generation(adapter: TextAdapter, variant: Variant) -> None:
    """Compare what a tiny clone in stages generates with the plain clone's `generate`, once for equal clones.

    Both generate by greedy and by beam search, with a
    cache; the prompts of a decoder are padded on the left.

    Raises UnsupportedModelError where tokens or logits differ, or the clone does not run.
    """
    compared_once(adapter, str(variant), lambda: _compare(adapter, variant))


def _compare(adapter: TextAdapter, variant: Variant) -> bool:
    """Whether the clone was compared: one that transformers itself cannot run says nothing of the model."""
    config = adapter.given_config
    model, clone = clone_of(adapter, torch.float32)
    model.eval()
    asked = [{**_prompts(model), **method, **_OPTIONS} for method in _METHODS]
    try:
        expected = [_generated_anew(model, options) for options in asked]
    except Exception as error:
        if unverified():
            why = one_line(str(error), 200)
            raise unsupported(config, f"generation by a tiny clone of the plain model fails: {why}") from error
        return False
    try:
        forwards = in_stages(model, clone, variant).forwards
        found = [forwards.generate(**options) for options in asked]
    except Exception as error:
        why = one_line(str(error), 200)
        raise unsupported(config, f"generation by a tiny clone in stages fails: {why}") from error
    for whole, split in zip(expected, found, strict=True):
        logits, others = (torch.stack(output.logits) for output in (whole, split))
        difference = float((logits - others).norm() / logits.norm())
        if not torch.equal(whole.sequences, split.sequences) or not difference <= _TOLERANCE:
            raise unsupported(
                config, f"generation by a tiny clone in stages has other logits, by {difference:.0e} of their norm"
            )
    return True


def _generated_anew(model: PreTrainedModel, options: Mapping[str, Any]) -> Any:
    """The plain model's output, which does not depend on what it has run before, as that of stages does not."""
    new = KeptState(model)
    try:
        return model.generate(**options)
    finally:
        new.restore()


def _prompts(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Rows of unequal length, padded on the right for an encoder and on the left for a decoder alone."""
    batch = padded_batch(model, with_images=False)
    prompts = text_entries(token_ids(batch), batch["attention_mask"])
    return prompts if model.config.is_encoder_decoder else {name: rows.flip(1) for name, rows in prompts.items()}
