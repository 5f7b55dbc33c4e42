"""The exceptions of hf_gpipe.

A `UserError` is something that the user can correct: a recipe, a file, a model that is not supported. Commands print it
as one message, without a traceback, and exit with code 2. A `StageError` is a failure of a run and names the place in
the pipeline; commands exit with code 1.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, ClassVar

#: Exit codes of a command other than 0: a failure; an error that the user can correct; a signal stopped the training
#: after a checkpoint was saved, so that the same command resumes it (EX_TEMPFAIL of sysexits.h).
EXIT_FAILURE, EXIT_USER_ERROR, EXIT_STOPPED = 1, 2, 75


class HfGpipeError(Exception):
    """The base of all exceptions below."""


class UserError(HfGpipeError, ValueError):
    """Something the user can correct: the message says what was found, what is allowed and the next step.

    It is a ValueError, because scripts expect one for a wrong argument.
    """

    #: The attributes that travel with it between processes, and their types.
    travelling: ClassVar[Mapping[str, tuple[type, ...]]] = {}


class RecipeError(UserError):
    """A recipe that cannot be used: names the key, the value found and what is allowed."""


class DataError(UserError):
    """A corpus, data file or tokenizer that cannot be used: names the file, the line and the field."""


class PartitionError(UserError):
    """An impossible split of the layers: names both numbers.

    Attributes:
        fullness: where the memory is too little, how many times the limit of a stage would be enough; else inf.
    """

    travelling: ClassVar = {"fullness": (float,)}

    def __init__(self, message: str, fullness: float = math.inf) -> None:
        super().__init__(message)
        self.fullness = fullness


class ScheduleError(UserError):
    """A table that is not a valid schedule: names the action and what it lacks.

    Attributes:
        line: the beginning of the wrong line of the table's text, such as "process 1"; None: it is not a single line.
    """

    travelling: ClassVar = {"line": (str, NoneType)}

    def __init__(self, message: str, line: str | None = None) -> None:
        super().__init__(message)
        self.line = line


class UnsupportedModelError(UserError):
    """A model that cannot be split exactly: names the architecture and the reason."""


class CheckpointError(UserError):
    """A checkpoint directory that is missing, incomplete or contradicts the model."""


class DisagreementError(UserError):
    """Processes of a run that were given different things: names the key, the values and the processes."""


class MissingAttributeError(UserError, AttributeError):
    """An attribute of transformers that does not exist here; the message says what to use. `hasattr` gives False."""


class StageError(HfGpipeError):
    """A run that failed inside the pipeline; the message names the rank, the stage, the action and the micro-batch."""


class NonFiniteError(HfGpipeError):
    """A step's loss or gradient is inf or NaN, and training is set to stop in that case; names the step."""


class PeerError(HfGpipeError):
    """This process cannot continue because another one failed; the other one's message has the cause."""


class MessageError(HfGpipeError):
    """A message of another process is not what it must be; says what was found."""


#: The exceptions that travel between processes, by their names.
_CLASSES: list[type[UserError]] = [UserError, *UserError.__subclasses__()]
_TRAVELLING = {cls.__name__: cls for cls in _CLASSES}


def error_to_data(error: UserError) -> tuple[str, str, dict[str, Any]]:
    """The data of which `error_of_data` makes the error: a class's name, its message and its attributes.

    An error of any other class becomes one of the nearest of its bases.
    """
    name = next(cls.__name__ for cls in type(error).__mro__ if _TRAVELLING.get(cls.__name__) is cls)
    return name, str(error), {attribute: getattr(error, attribute) for attribute in _TRAVELLING[name].travelling}


def error_of_data(name: str, message: str, attributes: Mapping[str, Any]) -> UserError:
    """The error of these data. Raises MessageError where they are not those of an error that may travel."""
    if name not in _TRAVELLING:
        raise MessageError(f"no error of class {name[:80]!r} travels between processes")
    cls = _TRAVELLING[name]
    types = cls.travelling
    if attributes.keys() != types.keys() or not all(isinstance(attributes[key], types[key]) for key in types):
        raise MessageError(f"a {name} with the attributes {str(dict(attributes))[:80]}")
    return cls(message, **attributes)


def check_number(name: str, value: Any, least: float = 0, *, most: float = math.inf, is_above: bool = False) -> None:
    """Raise UserError where an argument is no finite number of at least `least`, or above it, and at most `most`."""
    is_number = not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)
    if not is_number or not least <= value <= most or (is_above and value == least):
        lowest = "" if least == -math.inf else f" above {least}" if is_above else f" of at least {least}"
        highest = "" if most == math.inf else f" and at most {most}"
        raise UserError(f"{name}={value!r}: expected a finite number{lowest}{highest}")


def check_count(name: str, value: Any, least: int, most: float = math.inf, otherwise: str = "") -> None:
    """Raise UserError where an argument is no whole number of at least `least` and at most `most`.

    `otherwise` ends its message: what else the argument may be.
    """
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or not least <= value <= most:
        highest = "" if most == math.inf else f" and at most {most}"
        raise UserError(f"{name}={value!r}: expected a whole number of at least {least}{highest}{otherwise}")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise UserError where an argument is none of the allowed words."""
    if value not in allowed:
        hint = nearest(str(value), allowed)
        raise UserError(f"{name}={value!r} is not supported; choose one of {', '.join(allowed)}{hint}")


def nearest(given: str, allowed: Iterable[str]) -> str:
    """A hint for a misspelt name: "; did you mean 'x'?", with up to three names that begin with it, or the one that is
    most like it; an empty string where nothing is near."""
    names = list(allowed)
    begun = [name for name in names if given and name.startswith(given)]
    close = begun if 0 < len(begun) <= 3 else difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def listed(names: Sequence[str], most: int = 20) -> str:
    """The first `most` names, and how many more there are: "de, fr and 100 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def one_line(message: str, most: int = 2000) -> str:
    """A message on one line, without the middle of one that is too long: a file from outside may be quoted in it."""
    text = " ".join(message.split())
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
