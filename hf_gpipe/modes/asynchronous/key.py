"""Asynchronous schedules as a mode of a configuration."""

from __future__ import annotations

from typing import ClassVar

from hf_gpipe.errors import UserError
from hf_gpipe.modes.asynchronous.table import ASYNCHRONOUS_SCHEDULES
from hf_gpipe.settings.mode import AUTO, COMPARED_ROWS, Keys, Mode


class Asynchronous(Mode):
    """Stages that update by themselves, so that steps run in windows."""

    excludes: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("division", "chunks"), ""),
        "shared_updates": ": replicas share the whole step of an optimizer, and here each stage updates by itself",
        "compiled": ": compiled blocks would not see the versions of the weights that it keeps",
        COMPARED_ROWS: "schedule {schedule!r}: the loss, a {loss}, compares the rows of a mini-batch in two passes, "
        "between which no stage may update; use a synchronous schedule, such as 1f1b",
    }

    schedules = (*ASYNCHRONOUS_SCHEDULES,)

    def check(self, keys: Keys) -> None:
        if self.is_on(keys) and AUTO in (keys["num_stages"], keys["replicas"]):
            name = "num_stages" if keys["num_stages"] == AUTO else "replicas"
            raise UserError(
                f"schedule is {keys['schedule']} and {name} is auto; give {name}, for with it the numbers of an "
                "asynchronous schedule change."
            )


FIELDS = {"asynchronous": (Asynchronous, Asynchronous)}
