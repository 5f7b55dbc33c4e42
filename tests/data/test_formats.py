"""Readers of local files: what they read, from where they go on, and what they refuse."""

from __future__ import annotations

import csv
import gzip
import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.data import formats
from hf_gpipe.data.formats import count_parquet, read_csv, read_jsonl, read_parallel, read_parquet
from hf_gpipe.errors import DataError

ROWS = [{"source": f"Satz {n}", "target": f"sentence {n}"} for n in range(25)]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    """The rows in the format that the file's name says."""
    if ".parquet" in path.suffixes:
        # Several row groups, none of them as long as a batch.
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
        return path
    if ".jsonl" in path.suffixes:
        text = "\n\n".join(json.dumps(row) for row in rows) + "\n"
    else:
        mark = "\t" if ".tsv" in path.suffixes else ","
        text = "\n".join(mark.join(row) for row in ([*rows[0]], *(row.values() for row in rows))) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


READERS = {
    "rows.jsonl": read_jsonl,
    "rows.jsonl.gz": read_jsonl,
    "rows.csv": read_csv,
    "rows.csv.gz": read_csv,
    "rows.tsv": read_csv,
    "rows.tsv.gz": read_csv,
    "rows.parquet": read_parquet,
}


@pytest.mark.parametrize("name", READERS)
def test_every_row_from_any_row_on(tmp_path, name):
    path = write(tmp_path / name, ROWS)
    found = list(READERS[name](path))
    assert [row for _, row in found] == ROWS
    assert len({where for where, _ in found}) == len(ROWS)
    assert all(where.startswith(f"{path}, ") for where, _ in found)
    for start in (1, 6, 7, 8, 24, 25, 30):
        assert list(READERS[name](path, start)) == found[start:]


def test_the_line_of_a_row_is_named(tmp_path):
    assert next(iter(read_csv(write(tmp_path / "rows.csv", ROWS), 3)))[0].endswith("rows.csv, line 5")
    assert next(iter(read_jsonl(write(tmp_path / "rows.jsonl", ROWS), 3)))[0].endswith("rows.jsonl, line 7")
    assert next(iter(read_parquet(write(tmp_path / "rows.parquet", ROWS), 3)))[0].endswith("rows.parquet, row 4")


def test_parquet_tells_its_rows_and_keeps_nested_values(tmp_path):
    rows = [{"translation": {"de": f"Satz {n}", "en": f"sentence {n}"}} for n in range(20)]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert count_parquet(path) == 20
    assert [row for _, row in read_parquet(path)] == rows


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1)] * 2), min_size=1))
def test_quoted_values_come_back_whole(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as opened:
        csv.writer(opened, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *values])
    assert [tuple(row.values()) for _, row in read_csv(path)] == values


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.csv.gz"])
def test_documents_are_longer_than_the_limit_of_python_s_module(tmp_path, name):
    """A value of over 131,072 characters was "not CSV", whatever read another file at that time."""
    rows = [{"source": "a" * 200_000, "target": f"b{number}"} for number in range(3)]
    path, small = write(tmp_path / name, rows), write(tmp_path / "small.csv", ROWS)
    reader, other = read_csv(path), read_csv(small)
    found = [next(reader)[1]]
    assert len(list(other)) == len(ROWS), "its end leaves the limit of the other"
    assert found + [row for _, row in reader] == rows


def test_values_are_text_and_tabs_part_them_as_they_are(tmp_path):
    (tmp_path / "rows.csv").write_text('a,b\nNA,007\n"two\nlines","with, comma"\n')
    assert [row for _, row in read_csv(tmp_path / "rows.csv")] == [
        {"a": "NA", "b": "007"},
        {"a": "two\nlines", "b": "with, comma"},
    ]
    (tmp_path / "rows.tsv").write_text('a\tb\n"Hallo", sagte er\t"hello", he said\n')
    assert [row for _, row in read_csv(tmp_path / "rows.tsv")] == [{"a": '"Hallo", sagte er', "b": '"hello", he said'}]
    (tmp_path / "rows.txt").write_text("a;b\nx,1;y\n")
    assert [row for _, row in read_csv(tmp_path / "rows.txt", delimiter=";")] == [{"a": "x,1", "b": "y"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "rows.csv",
            b"a,b\n1,2\n1,2,3\n",
            r"rows\.csv, line 3: the number of values is 3, and the first line names 2 col",
        ),
        ("rows.csv", b"a,b\n1\n", "line 2: the number of values is 1"),
        ("rows.csv", b"a,a\n1,2\n", "line 1: the column 'a' is given twice"),
        ("rows.csv", b'a,b\n"1"x,2\n', "line 2 is not CSV"),
        ("rows.csv", b'a,b\n"1,2\n', "not CSV"),
        ("rows.csv", "a,b\ngrün,2\n".encode("latin-1"), "not UTF-8"),
        ("rows.csv.gz", b"a,b\n", r"rows\.csv\.gz cannot be read"),
        ("rows.csv", b'a,b\n"' + b"1234567\n" * (1 << 21) + b'1",2\n', "a value has more than 16777216 characters"),
        ("rows.csv", b"a,b\n" + b"1" * (1 << 24) + b",2\n", "line 2 has more than 16777216 characters"),
        ("rows.parquet", b"", r"rows\.parquet cannot be read as Parquet"),
        ("rows.parquet", b"PAR1" + b"\x00" * 40 + b"PAR1", r"rows\.parquet cannot be read as Parquet"),
        ("rows.parquet", "cut", r"rows\.parquet cannot be read as Parquet"),
        ("rows.parquet", "damaged", r"rows\.parquet cannot be read as Parquet"),
    ],
)
def test_malformed_files_are_refused(tmp_path, name, content, message):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        whole = bytearray(write(path, ROWS).read_bytes())
        whole[4:60] = b"\xff" * 56
        path.write_bytes(whole[: len(whole) // 2] if content == "cut" else whole)
    with pytest.raises(DataError, match=message):
        list(READERS[name](path))


@pytest.mark.parametrize("name", READERS)
def test_missing_files_are_refused(tmp_path, name):
    with pytest.raises(DataError, match=f"data file .*{name} does not exist"):
        list(READERS[name](tmp_path / name))


def test_lines_of_two_files_belong_together(tmp_path):
    (tmp_path / "x.de").write_text("eins\nzwei\rhalb\n\ndrei\r\n")
    (tmp_path / "x.en.gz").write_bytes(gzip.compress(b"one\ntwo\nempty\nthree"))
    found = list(read_parallel(tmp_path / "x.de", target_path=tmp_path / "x.en.gz"))
    assert [tuple(row.values()) for _, row in found] == [
        ("eins", "one"),
        ("zwei\rhalb", "two"),
        ("", "empty"),
        ("drei", "three"),
    ]
    assert found[3][0].endswith("x.de, line 4")
    assert list(read_parallel(tmp_path / "x.de", 2, target_path=tmp_path / "x.en.gz")) == found[2:]


@pytest.mark.parametrize(("source", "target"), [(5, 3), (3, 5), (0, 1), (2, 0)])
def test_unequal_numbers_of_lines_are_refused(tmp_path, source, target):
    (tmp_path / "x.de").write_text("Satz\n" * source)
    (tmp_path / "x.en").write_text("sentence\n" * target)
    with pytest.raises(DataError, match=rf"x\.de has {source} lines and .*x\.en has {target}"):
        list(read_parallel(tmp_path / "x.de", target_path=tmp_path / "x.en"))


# ---------------------------------------------------------------------- files that would take any memory


@pytest.fixture(scope="module")
def bombs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files of a few hundred kB that unpack to 100 MB: one line, an array of nothing, and rows."""
    folder, files = tmp_path_factory.mktemp("bombs"), []
    for name, part in (("line", b"0" * 1000), ("array", b"[]," * 300), ("rows", b'{"text": "aaaaaaaaa"}\n' * 50)):
        files.append(folder / f"{name}.gz")
        with gzip.open(files[-1], "wb", compresslevel=6) as packed:
            if name == "array":
                packed.write(b"[")
            for _ in range(100):
                packed.write(part * (1_000_000 // len(part)))
        assert files[-1].stat().st_size < 500_000
    return files


@pytest.mark.parametrize("read", [formats.read_jsonl, formats.read_csv, formats.read_json, formats.numbered_lines])
def test_a_decompression_bomb_is_refused_in_bounded_memory(
    read: Callable[[Path], Iterator[Any]], bombs: list[Path]
) -> None:
    for file in bombs:
        is_of_rows = file.name == "rows.gz"  # whose memory is not measured, because that takes long
        if not is_of_rows:
            tracemalloc.start()
        with pytest.raises(DataError) as caught:
            sum(1 for _ in read(file))
        assert str(file) in str(caught.value)
        if not is_of_rows:
            assert tracemalloc.get_traced_memory()[1] < 100e6
            tracemalloc.stop()


def test_what_is_packed_as_prose_is_read(tmp_path: Path) -> None:
    generator = random.Random(0)
    rows = [{"text": "".join(generator.choices("abcdefgh ", k=80))} for _ in range(2000)]
    with gzip.open(tmp_path / "x.jsonl.gz", "wt") as packed:
        packed.write("\n".join(map(json.dumps, rows)))
    assert [row for _, row in formats.read_jsonl(tmp_path / "x.jsonl.gz")] == rows


def test_a_line_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_LONGEST_LINE", 1000)
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": 1}\n{"a": "' + "b" * 1000 + '"}\n')
    with pytest.raises(DataError, match=r"x.jsonl, line 2 has more than 1000 characters"):
        list(formats.read_jsonl(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 500, "more than 64 levels|not a JSON array"),
        ("[" + "[" * 70 + "]" * 70 + "]", "entry 1: more than 64 levels"),
        ('[{"a": 1}, {"a": 2}', r"entry 2: Expecting ',' or '\]'"),
        ('[{"a": 1} {"a": 2}]', r"entry 1: Expecting ',' or '\]'"),
        ('[{"a": 1},]', "entry 2: Expecting value"),
        ("[,]", "entry 1: Expecting value"),
        ('[{"a": 1}] x', "'x' stands after it"),
        ('[{"a": 1}, 3]', "entry 2 is a JSON int"),
    ],
)
def test_arrays_that_are_damaged(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DataError, match=message):
        list(formats.read_json(tmp_path / "x.json"))


def test_an_array_that_is_not_utf8(tmp_path: Path) -> None:
    for content in (b"[\xff", b"[" + b" " * 2_000_000 + b"\xff"):
        (tmp_path / "x.json").write_bytes(content)
        with pytest.raises(DataError, match="not UTF-8"):
            list(formats.read_json(tmp_path / "x.json"))


def test_arrays_are_read_from_any_entry(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(' [ {"a": 1} ,\n{"a": [2]}\n, {"a": "]"}\t] \n')
    rows = [(str(tmp_path / f"x.json, entry {n}"), row) for n, row in enumerate(({"a": 1}, {"a": [2]}, {"a": "]"}), 1)]
    for start in range(4):
        assert list(formats.read_json(tmp_path / "x.json", start)) == rows[start:]
    (tmp_path / "x.json").write_text("[ ]")
    assert list(formats.read_json(tmp_path / "x.json")) == []
