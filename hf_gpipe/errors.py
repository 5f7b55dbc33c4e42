"""Every exception that hf_gpipe raises on purpose.

A `UserError` is something the reader of the message can put right: a recipe, a file, a model we do not
support. Commands print it as one message, without a traceback, and exit with code 2. A `StageError` is a fault
of a run and says where in the pipeline it happened; commands exit with code 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

#: Exit codes of a command beside 0: a fault; an error that the user can correct; a signal stopped the training, and all
#: of it is saved, so that the same command goes on with it (EX_TEMPFAIL of sysexits.h).
EXIT_FAILURE, EXIT_USER_ERROR, EXIT_STOPPED = 1, 2, 75


class HfGpipeError(Exception):
    """The base of all exceptions below."""


class UserError(HfGpipeError):
    """Something the user can correct: the message says what was found, what is allowed and the next step."""


class RecipeError(UserError):
    """A recipe that cannot be used: names the key, the value found and what is allowed."""


class DataError(UserError):
    """A corpus, data file or tokenizer that cannot be used: names the file, the line and the field."""


class PartitionError(UserError):
    """A split of the layers that is impossible: names both numbers."""


class ScheduleError(UserError):
    """A table that is not a valid schedule: names the action and what it lacks.

    Attributes:
        line: how the line of the table's text begins that is wrong, such as "process 1"; None: no single line is.
    """

    def __init__(self, message: str, line: str | None = None) -> None:
        super().__init__(message)
        self.line = line


class UnsupportedModelError(UserError):
    """A model that cannot be split exactly: names the architecture and the reason."""


class CheckpointError(UserError):
    """A checkpoint directory that is missing, incomplete or contradicts the model."""


class MissingAttributeError(UserError, AttributeError):
    """Something of transformers that does not exist here; it says what to use instead. `hasattr` gives False."""


class StageError(HfGpipeError):
    """A run that failed inside the pipeline; the message names the rank, the stage, the action and the micro-batch."""


class NonFiniteError(HfGpipeError):
    """A step whose loss or gradient is infinite or no number, where the training was told to stop; names the step."""


class PeerError(HfGpipeError):
    """This process cannot go on because another one failed, whose own message says why."""


def nearest(found: str, allowed: Iterable[str]) -> str:
    """A hint for a misspelt name: "; did you mean 'x'?", or an empty string where nothing is near."""
    close = difflib.get_close_matches(found, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def listed(names: Sequence[str], most: int = 20) -> str:
    """The first `most` names, and how many more there are: "de, fr and 100 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
