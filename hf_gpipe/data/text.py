"""Monolingual text: documents for pretraining, and the blocks of tokens that they are cut into."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_gpipe.data.fields import check_characters
from hf_gpipe.data.formats import numbered_lines, read_jsonl, read_parquet
from hf_gpipe.data.pairs import MAX_TOKENIZER_EXAMPLES
from hf_gpipe.data.progress import progress
from hf_gpipe.data.splits import Splits, drawn, read_splits
from hf_gpipe.data.store import in_blocks
from hf_gpipe.errors import DataError, nearest
from hf_gpipe.recipe import DataSection


@dataclass(frozen=True)
class TextCorpus(Splits[str]):
    """Documents in three splits."""

    def texts(self, max_texts: int | None = None) -> list[str]:
        """Training documents to train a tokenizer on.

        Args:
            max_texts: how many are sampled where there are more; None: `MAX_TOKENIZER_EXAMPLES`.
        """
        most = max_texts or MAX_TOKENIZER_EXAMPLES
        return drawn(self.train, most, "texts", most)


def text_corpus(data: DataSection) -> TextCorpus:
    """The documents of local files, or of a data set of the Hub.

    `data.path` is a file, wildcards, or a directory with files whose names end in .txt, .jsonl or .parquet, the first
    two perhaps in .gz; otherwise the Hub id of a data set, or a directory in its form. In a .txt file a document is a
    paragraph: lines up to a blank one; rows without text are left out. Equal documents are in the same split.

    Raises:
        DataError: no such files or data set, a name that ends otherwise, rows without the field, or no document to
            train on.
    """
    return TextCorpus(
        *read_splits(
            data,
            of_file=lambda file: _documents(file, data.text_field),
            of_rows=lambda rows: texts_of_rows(rows, data.text_field),
            text_of=str,
            what="documents",
        )
    )


def _documents(path: Path, text_field: str) -> Iterator[str]:
    name = path.name.removesuffix(".gz")
    if name.endswith(".txt"):
        yield from _paragraphs(line for _, line in numbered_lines(path))
    elif name.endswith(".jsonl"):
        yield from texts_of_rows(read_jsonl(path), text_field)
    elif name.endswith(".parquet"):
        yield from texts_of_rows(read_parquet(path), text_field)
    else:
        raise DataError(f"data.path: {path} is not a text file; names that end in .txt, .jsonl or .parquet are read")


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Lines up to a blank one, together."""
    for is_blank, some in groupby(lines, key=lambda line: not line.strip()):
        if not is_blank:
            yield "".join(some).rstrip("\r\n")


def texts_of_rows(rows: Iterable[tuple[str, Mapping[str, Any]]], text_field: str) -> Iterator[str]:
    """The text in a field of each row that has any; a row comes with what messages call it.

    Raises DataError for a row without the field, or with something else in it; names the row and its fields.
    """
    for where, row in rows:
        if text_field not in row:
            raise DataError(
                f"{where}: no field {text_field!r}{nearest(text_field, row)}; data.text_field names the one with the "
                f"text; the fields found are {', '.join(map(str, row)) or 'none'}"
            )
        text = row[text_field]
        if text is not None and not isinstance(text, str):
            raise DataError(f"{where}: field {text_field!r} has the type {type(text).__name__}; give text")
        if text and text.strip():
            check_characters(text, text_field, where)
            yield text


class TokenBlocks:
    """A dataset of {"input_ids": [...], "labels": [...]}, both the same block of consecutive tokens.

    The documents' tokens stand in a row, each document's followed by the end-of-sequence token, and are cut every
    `block_tokens`; the last block is shorter. So nothing is padded, a block may hold the end of one document and the
    start of the next, and a model learns every token from those before it in its block, all but the block's first.

    Raises DataError for blocks of fewer than 2 tokens, a tokenizer without an end-of-sequence token, or no text.
    """

    def __init__(self, documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, block_tokens: int) -> None:
        if block_tokens < 2:
            raise DataError(
                f"max_target_tokens is {block_tokens}; a block needs at least 2 tokens, to learn the second"
            )
        end = tokenizer.eos_token_id
        if end is None:
            raise DataError(
                f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token, which parts documents; set "
                "its eos_token"
            )
        self._tokens = array("i")
        with progress(None, "tokenising", "documents", len(documents)) as shown:
            for some in in_blocks(documents):
                for ids in tokenizer(list(some), add_special_tokens=False, verbose=False)["input_ids"]:
                    self._tokens.extend(ids)
                    self._tokens.append(end)
                shown.update(len(some))
        self._block_tokens = block_tokens
        # Of a single token nothing is learnt.
        self._num_tokens = len(self._tokens) - (len(self._tokens) % block_tokens == 1)
        if not self._num_tokens:
            raise DataError("the text has no tokens; give documents that are not empty")

    def __len__(self) -> int:
        return -(-self._num_tokens // self._block_tokens)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self._block_tokens
        block = self._tokens[start : min(start + self._block_tokens, self._num_tokens)].tolist()
        return {"input_ids": block, "labels": list(block)}

    @property
    def lengths(self) -> list[int]:
        """The tokens of each block."""
        last = self._num_tokens - (len(self) - 1) * self._block_tokens
        return [*[self._block_tokens] * (len(self) - 1), last]
