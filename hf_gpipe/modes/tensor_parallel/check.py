"""Whether the layers of a model can be divided among ranks."""

from __future__ import annotations

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.errors import UserError
from hf_gpipe.losses.loss import Loss
from hf_gpipe.modes.tensor_parallel.adapted import plan_of
from hf_gpipe.pipeline.variant import Probe, Variant
from hf_gpipe.settings.division import Division
from hf_gpipe.settings.pipeline import PipelineConfig


def check(config: PipelineConfig, adapter: Adapter, loss: Loss | None, *, packing: bool, probe: Probe) -> None:
    """Raise UserError where the layers cannot be divided, which a tiny clone says too: a plan needs their parts."""
    # Blocks of a companion are not compiled.
    is_compiled = config.compiled.torch_compile and loss is not None
    check_division(adapter, config.division, probe, is_compiled=is_compiled)


def divided(adapter: Adapter, num_ranks: int) -> Variant:
    """How a clone is divided as a model among so many ranks. The clone has four heads.

    It has two ranks; four where ranks of the model share key-value heads, and three where their parts are not even.
    Raises UserError where the model has fewer heads or columns than ranks.
    """
    try:
        plan = plan_of(adapter, num_ranks)
    except UserError as error:
        raise type(error)(f"{Division(num_ranks).text} and {error}, or leave tensor_parallel out") from None
    is_shared = any(cut.is_shared for cut in plan.cuts.values())
    return Variant(ranks=3 if not plan.is_even else 4 if is_shared else 2)


def check_division(adapter: Adapter, division: Division, probe: Probe, *, is_compiled: bool = False) -> None:
    """Raise UserError where the layers of a model, whose blocks may be compiled, cannot be divided so."""
    if division.is_whole:
        return
    others = {
        "the model is no Hugging Face model that reads text": not isinstance(adapter, TextAdapter),
        "functions of its modules were replaced": bool(adapter.patches),
    }
    for what, is_so in others.items():
        if is_so:
            raise UserError(f"{division.text} and {what}, which do not go together; leave tensor_parallel out")
    probe.require(adapter, divided(adapter, division.num_ranks))
    for name, probability in adapter.dropout.items() if is_compiled else ():
        # What draws the masks (masks.py) breaks compiled code into pieces, and with some backends draws them twice.
        raise UserError(
            f"{division.text}, torch_compile is true and {name} is {probability}, which do not go together: "
            f"a compiled block may draw other masks; leave torch_compile out, or set {name} to 0"
        )
