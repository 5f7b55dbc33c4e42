"""Whether the layers of a model can be divided among ranks."""

from __future__ import annotations

from collections.abc import Callable

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.errors import UserError
from hf_gpipe.settings.division import Division


def check_division(
    adapter: Adapter, division: Division, verify: Callable[[], None], *, is_compiled: bool = False
) -> None:
    """Raise UserError where the layers of a model, whose blocks may be compiled, cannot be divided so.

    Args:
        adapter, division: of the model.
        verify: raises UserError where a tiny clone of the model that is divided computes something else.
    """
    if division.is_whole:
        return
    others = {
        "the model is no Hugging Face model that reads text": not isinstance(adapter, TextAdapter),
        "functions of its modules were replaced": bool(adapter.patches),
    }
    for what, is_so in others.items():
        if is_so:
            raise UserError(f"{division.text} and {what}, which do not go together; leave tensor_parallel out")
    verify()
    for name, probability in adapter.dropout.items() if is_compiled else ():
        # What draws the masks (masks.py) breaks compiled code into pieces, and with some backends draws them twice.
        raise UserError(
            f"{division.text}, torch_compile is true and {name} is {probability}, which do not go together: "
            f"a compiled block may draw other masks; leave torch_compile out, or set {name} to 0"
        )
