"""A teacher as a mode of a configuration: a loss turns it on, and no key does."""

from __future__ import annotations

from typing import ClassVar

from hf_gpipe.settings.mode import Keys, Mode

_USE_ANOTHER = "there is a teacher and schedule is {schedule}, which do not go together; use 1f1b"


class Teacher(Mode):
    """A teacher beside the model."""

    excludes: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("chunks", "visits"), ""),
        **dict.fromkeys(("divided_head", "asynchronous"), _USE_ANOTHER),
    }

    instead = ""

    @classmethod
    def setting(cls) -> str:
        return "a teacher"

    def in_use(self, keys: Keys) -> str:
        return "there is a teacher"

    def is_on(self, keys: Keys) -> bool:
        return False


FIELDS = {"teacher": (Teacher, Teacher)}
