"""JSON from outside: whatever is wrong in a file ends in one error that names the file and the key."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, NotRequired

import pytest
from typing_extensions import TypedDict

from hf_gpipe import strict_json
from hf_gpipe.errors import CheckpointError, DataError


class Shape(TypedDict):
    step: strict_json.Number
    files: dict[str, str | list[int]]
    note: NotRequired[str | None]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is not JSON that can be read"),
        (b"{", "it is not JSON that can be read"),
        (b"\xff\xfe", "it is not JSON that can be read .*utf-8"),
        (b"[" * 100_000, "more than 64 levels"),
        (b'{"a":' * 900 + b"1" + b"}" * 900, "more than 64 levels"),
        (b"[" * 66 + b"]" * 66, "more than 64 levels"),
        (b'{"step": NaN}', "NaN is not a number of JSON"),
        (b'{"step": ' + b"9" * 41 + b"}", "a whole number of 41 digits"),
        (b'{"step": ' + b"9" * 5000 + b"}", "a whole number of 5000 digits"),
        (b"[]", r"it is \[\] \(a list\), expected a valid dictionary"),
        (b"{}", "'step' is missing"),
        (b'{"step": "3", "files": {}}', r"step is '3' \(a string\), expected a valid integer"),
        (b'{"step": true, "files": {}}', "step is true"),
        (b'{"step": 3.0, "files": {}}', "step is 3.0"),
        (b'{"step": -3, "files": {}}', "step is -3 .*, expected greater than or equal to 0"),
        (b'{"step": 99999999999999999999, "files": {}}', "step is 99999999999999999999"),
        (b'{"step": 3, "files": {"x": {"y": 1}}}', "files.x is {'y': 1}"),
        (b'{"step": 3, "files": {"x": [1, "2"]}}', "files.x"),
        (b'{"step": 3, "files": [["x", "y"]]}', r"files is \[\['x', 'y'\]\]"),
    ],
)
def test_what_is_wrong_is_told_with_file_and_key(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        strict_json.read(file, Shape)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 400
    with pytest.raises(DataError, match=message):
        strict_json.read(file, Shape, error=DataError)


def test_what_has_the_shape_is_returned_as_it_is(tmp_path: Path) -> None:
    value = {"step": 3, "files": {"a": "b", "c": [1, 2]}, "more": [[[]]], "note": None}
    (tmp_path / "state.json").write_text(json.dumps(value))
    assert strict_json.read(tmp_path / "state.json", Shape) == value
    deep: Any = 1
    for _ in range(64):
        deep = [deep]
    assert strict_json.parse(json.dumps(deep), "x") == deep
    assert strict_json.parse("[Infinity]", "x", list[float], allows_nan=True) == [float("inf")]


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("pipe", "loop", "missing", ".", "a" * 300, "a\0b", "/dev/zero"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            strict_json.read(tmp_path / name)


def test_large_files_are_refused_before_they_take_memory(tmp_path: Path) -> None:
    start = time.monotonic()
    with (tmp_path / "large").open("wb") as file:
        file.truncate(strict_json.MOST_BYTES + 1)  # a hole, which takes no disk
    with pytest.raises(CheckpointError, match="bytes, and at most"):
        strict_json.read(tmp_path / "large")
    with pytest.raises(CheckpointError, match="more than 5000000 values"):
        strict_json.parse("[" + "[]," * 5_000_000 + "[]]", "x")
    assert time.monotonic() - start < 10
