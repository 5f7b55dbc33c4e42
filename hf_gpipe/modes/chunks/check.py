"""Whether rows can be cut into chunks of tokens, by the model, the loss and the tiny clone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.errors import UnsupportedModelError, one_line
from hf_gpipe.losses.loss import Loss
from hf_gpipe.model.clone import clone_of, compared_once, narrowed, padded_batch
from hf_gpipe.model.reference import plain_step
from hf_gpipe.modes.chunks.cutting import check_chunks
from hf_gpipe.modes.chunks.key import SETTING
from hf_gpipe.pipeline.clone_steps import split_step
from hf_gpipe.pipeline.probe import TOLERANCE
from hf_gpipe.pipeline.variant import ModeVariant, Probe, Variant
from hf_gpipe.settings.pipeline import PipelineConfig


def check(config: PipelineConfig, adapter: Adapter, loss: Loss | None, *, packing: bool, probe: Probe) -> None:
    """Raise UserError where rows are cut, or may be, and model, loss or packed documents do not allow it."""
    if config.cuts_rows and loss is not None:
        check_chunks(adapter, reads_tokens_only=loss.reads_tokens_only, packing=packing)


def verify(config: PipelineConfig, adapter: Adapter, *, packing: bool, probe: Probe) -> None:
    """Raise UnsupportedModelError where a tiny clone whose rows are cut differs from the plain one.

    A model with a state beside keys and values, or whose tokens attend to later ones, cannot be cut so.
    """
    if config.cuts_rows:
        recompute = "block" if "block" in (config.recompute or ()) else "stage"
        probe.require(adapter, InChunks(2, recompute, packing=packing))


@dataclass(frozen=True)
class InChunks(ModeVariant):
    """Rows, which may be packed, in chunks. A step of packed rows is compared with that of whole packed rows."""

    keys: ClassVar[dict[str, int]] = {SETTING: 3}
    setting = SETTING
    cause = "its layers keep more of earlier tokens than keys and values, or attend to later ones"

    def differs(self, adapter: TextAdapter, *, is_flipped: bool = False) -> float:
        model, clone = clone_of(adapter, torch.float64)
        # Documents of a row may not be longer than the limit of its rotary embeddings; rows alone may.
        batch = narrowed(padded_batch(model, with_images=False), self.packing and clone.padding_matters_beyond)
        if is_flipped:
            clone.padding_predicts_in_groups = True
            batch = {name: tensor.flip(1) for name, tensor in batch.items()}
        if self.packing:
            whole = split_step(model, clone, batch, Variant(1, packing=True))
        else:
            whole = plain_step(model, batch, clone)
        return split_step(model, clone, batch, self).difference(whole)

    def compared(self, adapter: TextAdapter, what: str) -> None:
        """The adapter takes rows whose first token is predicted by padding on their left, where its clone does."""
        if not self.packing:
            adapter.padding_predicts_in_groups |= compared_once(
                adapter, f"{what}, padded on the left", lambda: self._padding_predicts(adapter)
            )

    def _padding_predicts(self, adapter: TextAdapter) -> bool:
        """Whether padding on the left of rows predicts the same with chunks as without."""
        try:
            return self.differs(adapter, is_flipped=True) <= TOLERANCE
        except Exception as error:
            family, reason = adapter.given_config.model_type, one_line(str(error), 300)
            raise UnsupportedModelError(
                f"{family}: {SETTING} of rows padded on the left fails on a tiny clone: {reason}; leave {SETTING} out"
            ) from error
