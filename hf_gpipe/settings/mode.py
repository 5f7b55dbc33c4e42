"""Modes: settings that belong together, with what they do not go with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Optional, TypeAlias, TypeVar

from pydantic import BeforeValidator, create_model

from hf_gpipe.registry import parts_of_modes
from hf_gpipe.schedule import Schedule
from hf_gpipe.schedule.groups import Groups
from hf_gpipe.settings.section import Settings, keys_of

T = TypeVar("T")
S = TypeVar("S", bound=Settings)
Auto = Literal["auto"]
AUTO: Auto = "auto"
Listed = BeforeValidator(lambda value: tuple(value) if isinstance(value, list | range) else value)
if TYPE_CHECKING:
    NotGiven: TypeAlias = Annotated[T, "None until it is known what that stands for"]
else:
    NotGiven = Optional
#: The value of a key until it is known what stands for it.
NOT_GIVEN: Any = None

Visitors = Literal["frozen", "experts", "all"]
"""The weights that are not trained; of these the experts of mixtures alone; or all but trained ones that stages may
share."""

#: Marks keys of a run that a plan does not have; and those of them that may have another value in each process.
RUN, EACH_PROCESS = object(), object()

#: What modes exclude beside other modes: a loss that compares the rows of a mini-batch.
COMPARED_ROWS = "compared_rows"


#: The value of each key of a configuration, by its name.
Keys = Mapping[str, Any]


class Mode(Settings):
    """A way to run a pipeline: its keys, and what it does not go with. A mode without keys follows from other keys.

    The first key says whether the mode is on.
    """

    #: What it does not go with, mostly the fields of other modes -> why: the part of a message after a colon, or the
    #: message with names of keys in braces. One of the two modes says it.
    excludes: ClassVar[dict[str, str]] = {}

    #: What a message advises beside leaving out the key of a mode that it does not go with.
    instead: ClassVar[str] = ", or use another schedule, such as 1f1b"

    #: Whether each stage has a part of the last layer.
    shares_last_layer: ClassVar[bool] = False

    #: Whether it cuts the rows of micro-batches into groups.
    cuts_rows: ClassVar[bool] = False

    #: The schedules that turn it on.
    schedules: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def setting(cls) -> str:
        """The words that turn it on, for a page: its first key, or schedules."""
        return next(iter(keys_of(cls)), f"schedule: {', '.join(cls.schedules)}")

    @property
    def groups(self) -> Groups:
        """The groups that it cuts micro-batches into, where that is not left to the planner."""
        return Groups()

    @property
    def left_open(self) -> tuple[str, ...]:
        """Its keys that the planner decides although they are not "auto"."""
        return ()

    def is_on(self, keys: Keys) -> bool:
        """Whether a configuration of these keys uses it, or may do so."""
        own = [key.value_in(self) != key.default for key in keys_of(type(self)).values()]
        return any(own[:1]) or keys["schedule"] in self.schedules

    def in_use(self, keys: Keys) -> str:
        """The words of a message that say what turns it on, where that is no key of its own."""
        return f"schedule is {keys['schedule']}"

    def plain(self, keys: Keys) -> Mapping[str, Any]:
        """The values of keys that are not given, where it is on and the planner may choose none of them; else empty."""
        return {}

    def check(self, keys: Keys) -> None:
        """Raise UserError where its keys contradict each other, or other keys of the configuration."""

    def check_table(self, table: Schedule) -> None:
        """Raise UserError where its keys contradict the table of a file."""


def with_modes(base: type[S], *, are_decided: bool = False) -> type[S]:
    """Settings with a field of each mode that has a key, or follows from other keys (`hf_gpipe.modes`).

    Args:
        base: the settings without them.
        are_decided: whether nothing is left to the planner.
    """
    found = {name: types for key in parts_of_modes("key").values() for name, types in key.FIELDS.items()}
    fields: dict[str, Any] = {name: (types[are_decided], types[are_decided]()) for name, types in found.items()}
    return create_model(base.__name__, __base__=base, **fields)
