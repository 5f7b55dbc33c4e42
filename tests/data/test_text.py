"""Documents and the blocks that they are cut into."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.data import splits
from hf_gpipe.errors import DataError
from hf_gpipe.recipe import DataSection
from hf_gpipe.tasks.text import TokenBlocks, text_corpus

EVERYTHING: dict[str, Any] = {"validation_fraction": 0.0, "test_fraction": 0.0}


def of(path: str, **options: Any) -> splits.Corpus:
    return text_corpus(DataSection(kind="text", path=path, **options))


class Letters:
    """A tokenizer whose tokens are characters; 1 ends a sequence."""

    eos_token_id: int | None = 1
    name_or_path = "letters"

    def __call__(self, texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
        assert options["add_special_tokens"] is False
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


# ---------------------------------------------------------------------- documents


def test_paragraphs_rows_and_columns_are_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\n \nthree\n", encoding="utf-8")
    with gzip.open(tmp_path / "b.txt.gz", "wt", encoding="utf-8") as file:
        file.write("four")
    lines = [json.dumps({"text": text, "n": 1}) for text in ("five", "", "six")]
    (tmp_path / "c.jsonl").write_text("\n".join(lines), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": "seven"}, {"text": None}]), tmp_path / "d.parquet")
    (tmp_path / "e.md").write_text("another kind of file")
    everything = ["one\ntwo", "three", "four", "five", "six", "seven"]
    assert of(str(tmp_path), **EVERYTHING).train == everything
    assert of(str(tmp_path / "*.txt*"), **EVERYTHING).train == everything[:3]
    drawn = of(str(tmp_path), max_examples=3, **EVERYTHING).train
    assert len(drawn) == 3
    assert [text for text in everything if text in drawn] == drawn


@pytest.mark.parametrize("where", [".", "data"])
def test_a_data_set_s_own_splits_are_kept(where: str, tmp_path: Path) -> None:
    for split, texts in {"train": ["a", "b", " "], "test": ["c"]}.items():
        table = pyarrow.Table.from_pylist([{"body": text} for text in texts])
        (tmp_path / where).mkdir(exist_ok=True)
        pyarrow.parquet.write_table(table, tmp_path / where / f"{split}-00000-of-00001.parquet")
    corpus = of(str(tmp_path), text_field="body", validation_fraction=0.0, test_fraction=0.9)
    assert corpus.train == ["a", "b"]
    assert corpus.test == ["c"]
    assert corpus.validation == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "\\ud800"}', "line 1: field 'text' has half of a surrogate pair"),
        ("a.jsonl", '{"txt": "a"}', "no field 'text'; did you mean 'txt'"),
        ("a.jsonl", '{"text": 3}', "line 1: field 'text' is 3; it must be text"),
        ("a.txt", "", "no documents to train on"),
        ("a.doc", "text", "names that end in .txt, .jsonl or .parquet are read"),
    ],
)
def test_what_is_no_text(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        of(str(tmp_path / name), **EVERYTHING)


def test_splits_in_one_directory_are_not_trained_on_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train.txt", "valid.txt"):
        (tmp_path / name).write_text("a\n\nb\n")
    with pytest.raises(DataError, match=r"look held out, as valid\.txt, beside others, as train\.txt"):
        of(str(tmp_path), **EVERYTHING)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    with pytest.raises(DataError, match="look held out"):
        of(f"~/{tmp_path.name}", **EVERYTHING)
    assert of(str(tmp_path / "train*"), **EVERYTHING).train == ["a", "b"]
    with pytest.raises(DataError, match=r"data\.subset is 'en'.*are files of this machine"):
        of(str(tmp_path / "train.txt"), subset="en", **EVERYTHING)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file matches"):
        of(str(tmp_path / "*.txt"))
    with pytest.raises(DataError, match="does not exist"):
        of(str(tmp_path / "absent.txt"))


def split(documents: list[str]) -> splits.Corpus:
    data = DataSection(kind="text", path="x.txt", validation_fraction=0.2, test_fraction=0.2)
    return splits.Corpus(**splits.split_beside((), documents, data, str, "documents"))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=60))
def test_a_document_s_split_depends_on_it_alone(documents: list[str]) -> None:
    try:
        corpus = split(documents)
    except DataError:
        return
    everything = [*corpus.train, *corpus.validation, *corpus.test]
    assert sorted(everything) == sorted(documents)
    assert not set(corpus.train) & {*corpus.validation, *corpus.test}, "equal documents are in the same split"
    assert not set(corpus.validation) & set(corpus.test)
    again = split([*documents, "another"])
    assert set(corpus.test) <= set(again.test)


# ---------------------------------------------------------------------- blocks


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text("abc", max_size=7), min_size=1, max_size=8), st.integers(2, 9))
def test_blocks_are_the_documents_joined_and_cut(documents: list[str], size: int) -> None:
    joined = [token for text in documents for token in [*map(ord, text), 1]]
    if joined == [1]:
        return
    blocks = TokenBlocks(documents, Letters(), size)  # type: ignore[arg-type]
    rows = [blocks[index] for index in range(len(blocks))]
    read = [token for row in rows for token in row["input_ids"]]
    assert joined[: len(read)] == read
    assert len(joined) - len(read) <= 1, "nothing is lost but a last token that no other stands before"
    assert all(row["labels"] == row["input_ids"] for row in rows)
    assert all(len(row["input_ids"]) == size for row in rows[:-1])
    assert 2 <= len(rows[-1]["input_ids"]) <= size
    assert blocks.lengths == [len(row["input_ids"]) for row in rows]
    with pytest.raises(IndexError):
        blocks[len(blocks)]


def test_what_gives_no_blocks() -> None:
    with pytest.raises(DataError, match="max_target_tokens is 1"):
        TokenBlocks(["a"], Letters(), 1)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="the text has no tokens"):
        TokenBlocks([], Letters(), 4)  # type: ignore[arg-type]
    endless = Letters()
    endless.eos_token_id = None
    with pytest.raises(DataError, match="no end-of-sequence token"):
        TokenBlocks(["a"], endless, 4)  # type: ignore[arg-type]
