"""Asynchronous schedules as a mode of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hf_gpipe.errors import UserError
from hf_gpipe.modes.asynchronous.table import ASYNCHRONOUS_SCHEDULES
from hf_gpipe.schedule import has_windows
from hf_gpipe.settings.mode import AUTO, COMPARED_ROWS, Keys, Mode

if TYPE_CHECKING:  # settings are made before recipes
    from hf_gpipe.recipe.training import TrainingMeaning


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


def check_training(training: TrainingMeaning, schedule: str | None, what: str, *, scales_loss: bool) -> None:
    """Raise UserError for arguments that need the gradients of all stages, where each stage updates by itself.

    Args:
        training: the arguments.
        schedule: the schedule's name.
        what: words that say so.
        scales_loss: whether the loss is scaled.
    """
    if not has_windows(schedule or ""):
        return
    if scales_loss:
        raise UserError(
            f"fp16 is true and {what}: the scale of the loss needs the gradients of all stages before an update; use "
            "bf16, or a synchronous schedule, such as 1f1b"
        )
    if training.on_nonfinite_loss == "skip":
        raise UserError(
            f"on_nonfinite_loss is skip and {what}: the loss of a step is known after most stages have updated; use "
            "stop or ignore, or a synchronous schedule, such as 1f1b"
        )
