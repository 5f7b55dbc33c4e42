"""JSON Lines: one object a line. Blank lines are no rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_gpipe.data.formats.text import numbered_lines
from hf_gpipe.errors import DataError


def read(path: Path, start: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each line that is not blank, as ("file, line 7", the object on it)."""
    row = 0
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        row += 1
        if row > start:
            where = f"{path}, line {number}"
            yield where, _object(line, where)


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno}); write one object a line") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets by the thousand
        raise DataError(f"{where}: JSON that cannot be read ({error}); write one object a line") from error
    if not isinstance(found, dict):
        raise DataError(f"{where}: a JSON {type(found).__name__} where an object such as {{...}} is needed")
    return found
