"""JSON from outside, read strictly: every file of a checkpoint, a model's directory or a cache goes through here.

Whatever is wrong ends in one error that names the file, the key, what was found and what is allowed. The limits below
keep a file of a few bytes from taking minutes, gigabytes or the interpreter's stack.
"""

from __future__ import annotations

import functools
import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from hf_gpipe.errors import CheckpointError, UserError
from hf_gpipe.text import shorten, show

#: A larger file is refused before it is read. The history of a run of half a million logs takes less.
MOST_BYTES = 1 << 27
#: Values of one file, which take up to 72 bytes of memory each.
MOST_VALUES = 5_000_000
DEEPEST = 64
"""The most lists and mappings inside of each other."""
#: Digits of a whole number: 128 bits, as the state of numpy's generators has.
_MOST_DIGITS = 39

Number = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""A whole number that counts something: steps, bytes, rows."""

_adapter = functools.cache(TypeAdapter[Any])


def read(path: Path, shape: Any = Any, *, error: type[UserError] = CheckpointError, allows_nan: bool = False) -> Any:
    """The JSON value in a file.

    Args:
        path: the file.
        shape: the type that the value must have, such as `dict[str, list[int]]` or a TypedDict; nothing is converted.
        error: the class of error to raise.
        allows_nan: whether NaN and Infinity are read, which are not JSON, and which Python writes all the same.

    Raises:
        UserError: of the class `error`: the file cannot be read, is no JSON, is beyond a limit, or has another shape.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > MOST_BYTES:
            raise ValueError(f"it has {status.st_size} bytes, and at most {MOST_BYTES} are allowed")
        content = path.read_bytes()
    except (OSError, ValueError) as caught:
        raise error(f"{path} cannot be read: {caught}") from caught
    return parse(content, str(path), shape, error=error, allows_nan=allows_nan)


def parse(
    content: bytes | str,
    source: str,
    shape: Any = Any,
    *,
    error: type[UserError] = CheckpointError,
    allows_nan: bool = False,
) -> Any:
    """The JSON value in bytes or text; `source` names it in messages. The other arguments and errors are `read`'s."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        if len(text) > MOST_BYTES:
            raise ValueError(f"it has {len(text)} characters, and at most {MOST_BYTES} are allowed")
        brackets = text.count("[") + text.count("{")
        if brackets + text.count(",") > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES} values")
        value = json.loads(text, parse_int=_whole_number, parse_constant=None if allows_nan else _refuse_constant)
        if brackets > DEEPEST and is_deeper(value):
            raise RecursionError
    except RecursionError:
        raise error(f"{source} is damaged: it has more than {DEEPEST} levels of lists and mappings") from None
    except ValueError as caught:  # also of bytes that are not UTF-8
        why = shorten(" ".join(str(caught).split()), 120)
        raise error(f"{source} is damaged: it is not JSON that can be read ({why})") from None
    fit(value, shape, source, error=error)
    return value


def fit(value: Any, shape: Any, source: str, *, error: type[UserError] = CheckpointError) -> Any:
    """A JSON value as one of a type. Raises `error` where it is none; the arguments are those of `parse`."""
    try:
        return _adapter(shape).validate_python(value, strict=True)
    except ValidationError as caught:
        first = caught.errors(include_url=False, include_context=False)[0]
        key, content = "", value
        for part in first["loc"]:  # the path to the value, and names of alternatives that were tried
            if isinstance(content, Mapping) and part in content:
                key, content = f"{key}.{part}".lstrip("."), content[part]
            elif isinstance(content, list) and isinstance(part, int) and part < len(content):
                key, content = f"{key}[{part}]", content[part]
        if first["type"] == "missing":
            place = f" in {key}" if key else ""
            raise error(f"{source} is damaged: {str(first['loc'][-1])!r} is missing{place}") from None
        allowed = re.sub(r"^Input should be | or (an )?instance of \w+$", "", first["msg"])
        raise error(f"{source} is damaged: {key or 'it'} is {show(content)}, expected {allowed}") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS + 1:
        raise ValueError(f"it has a whole number of {len(digits)} digits")
    return int(digits)


def is_deeper(value: Any, most: int = DEEPEST) -> bool:
    """Whether lists and mappings are nested in more levels than `most`."""
    level = [value]
    for _ in range(most):
        inside = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level = [inner for part in inside for inner in part]
    return any(isinstance(part, dict | list) for part in level)
