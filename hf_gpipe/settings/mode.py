"""Modes: settings that belong together, with what they do not go with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Optional, TypeAlias, TypeVar

from pydantic import BeforeValidator

from hf_gpipe.settings.section import Settings, keys_of

T = TypeVar("T")
Auto = Literal["auto"]
AUTO: Auto = "auto"
Listed = BeforeValidator(lambda value: tuple(value) if isinstance(value, list | range) else value)
if TYPE_CHECKING:
    NotGiven: TypeAlias = Annotated[T, "None until it is known what that stands for"]
else:
    NotGiven = Optional
#: The value of a key until it is known what stands for it.
NOT_GIVEN: Any = None

#: Marks keys of a run that a plan does not have; and those of them that may have another value in each process.
RUN, EACH_PROCESS = object(), object()

#: What modes exclude: the modes of these fields, a teacher, and a loss that compares the rows of a mini-batch.
ASYNCHRONOUS, DIVIDED_HEAD, DEALT_STAGES = "asynchronous", "divided_head", "dealt_stages"
TEACHER, COMPARED_ROWS = "teacher", "compared_rows"


#: The value of each key of a configuration, by its name.
Keys = Mapping[str, Any]


class Mode(Settings):
    """A way to run a pipeline: its keys, and what it does not go with. A mode without keys follows from other keys.

    The first key says whether the mode is on.
    """

    #: What it does not go with -> why: the part of a message after a colon, or the message with names of keys in
    #: braces.
    excludes: ClassVar[dict[str, str]] = {}

    #: The schedules that turn it on.
    schedules: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def setting(cls) -> str:
        """The words that turn it on, for a page: its first key, or schedules."""
        return next(iter(keys_of(cls)), f"schedule: {', '.join(cls.schedules)}")

    def is_on(self, keys: Keys) -> bool:
        """Whether a configuration of these keys uses it, or may do so."""
        own = [key.value_in(self) != key.default for key in keys_of(type(self)).values()]
        return any(own[:1]) or keys["schedule"] in self.schedules

    def check(self, keys: Keys) -> None:
        """Raise UserError where its keys contradict each other, or other keys of the configuration."""
