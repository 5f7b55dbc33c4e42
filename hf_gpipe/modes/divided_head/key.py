"""A divided head as a mode of a configuration."""

from __future__ import annotations

from typing import ClassVar

from hf_gpipe.modes.divided_head.table import DIVIDED_HEAD
from hf_gpipe.settings.mode import Mode


class DividedHead(Mode):
    """A head that is divided by the vocabulary over all stages."""

    excludes: ClassVar[dict[str, str]] = dict.fromkeys(("division", "chunks", "visits", "boundary"), "")

    shares_last_layer = True
    schedules = DIVIDED_HEAD


FIELDS = {"divided_head": (DividedHead, DividedHead)}
