"""Whether rows can be cut into chunks of tokens, by the model, the loss and the tiny clone."""

from __future__ import annotations

from hf_gpipe.adapters import Adapter
from hf_gpipe.losses.loss import Loss
from hf_gpipe.modes.chunks.cutting import check_chunks
from hf_gpipe.pipeline.variant import Probe, in_chunks
from hf_gpipe.settings.pipeline import PipelineConfig


def check(config: PipelineConfig, adapter: Adapter, loss: Loss | None, *, packing: bool, probe: Probe) -> None:
    """Raise UserError where rows are cut, or may be, and model, loss or packed documents do not allow it."""
    if config.cuts_rows and loss is not None:
        check_chunks(adapter, is_loss_of_tokens=loss.is_of_tokens, packing=packing)


def verify(config: PipelineConfig, adapter: Adapter, *, packing: bool, probe: Probe) -> None:
    """Raise UnsupportedModelError where a tiny clone whose rows are cut differs from the plain one.

    A model with a state beside keys and values, or whose tokens attend to later ones, cannot be cut so.
    """
    if config.cuts_rows:
        blocks = "block" in (config.recompute or ())
        probe.require(adapter, in_chunks(packing=packing, recomputes_blocks=blocks))
