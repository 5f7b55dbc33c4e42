"""Monolingual text: documents for pretraining, and the blocks of tokens that they are cut into."""

from __future__ import annotations

import glob
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from hf_gpipe.data.deterministic import stable_random
from hf_gpipe.data.fields import PairFields, check_characters
from hf_gpipe.data.files import SUFFIXES, files_of, held_out_beside_others
from hf_gpipe.data.formats import numbered_lines, read_jsonl, read_parquet
from hf_gpipe.data.pairs import MAX_TOKENIZER_EXAMPLES, SPLITS, split_of
from hf_gpipe.data.progress import progress
from hf_gpipe.data.store import in_blocks
from hf_gpipe.errors import DataError, nearest
from hf_gpipe.recipe import DataSection

T = TypeVar("T")


@dataclass(frozen=True)
class TextCorpus:
    """Documents in three splits."""

    train: list[str]
    validation: list[str]
    test: list[str]
    languages: list[str] = field(default_factory=list)
    target_tags: list[str] = field(default_factory=list)

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
    paragraph: lines up to a blank one; rows without text are left out. A data set's own splits "validation" and "test"
    are kept; a split that it has not is cut off from the training documents by a hash of each (split_documents).
    `data.max_examples` documents are drawn from those to train on, or to split, and keep their order.

    Raises:
        DataError: no such files or data set, a name that ends otherwise, rows without the field, or no document to
            train on.
    """
    path = data.path or ""
    if is_local(path, "text"):
        if data.subset is not None or data.revision is not None:
            key, value = ("subset", data.subset) if data.subset is not None else ("revision", data.revision)
            raise DataError(f"data.{key} is {value!r}, and {path} are files of this machine; leave data.{key} out")
        documents: Iterator[str] = (
            text for file in files_of(path, "text") for text in _documents(file, data.text_field)
        )
        own: dict[str, list[str]] = {}
    else:
        from hf_gpipe.data.hub import hub_parts  # its library takes a second to import

        (part,) = hub_parts(data, PairFields.of(data))
        documents = texts_of_rows(part.train(), data.text_field)
        held_out = {"validation": part.validation, "test": part.test}
        own = {name: list(texts_of_rows(rows(), data.text_field)) for name, rows in held_out.items() if rows}
    read = list(progress(documents, f"reading {path}", "documents"))
    corpus = split_documents(
        drawn(read, data.max_examples, "max_examples", data.seed),
        validation_fraction=0.0 if "validation" in own else data.validation_fraction,
        test_fraction=0.0 if "test" in own else data.test_fraction,
    )
    return replace(corpus, **own)


def is_local(path: str, kind: str) -> bool:
    """Whether `path` means files of this machine that have documents or conversations, there or not."""
    if glob.has_magic(path) or path.endswith(SUFFIXES[kind]):
        return True
    try:
        found = Path(path).expanduser()
        files = [file for file in found.iterdir() if _is_of(file, kind)] if found.is_dir() else []
    except (OSError, ValueError):  # a name that no file can have
        return False
    # A directory with splits has the form of a data set, unless its documents are paragraphs, of which `datasets` knows
    # nothing.
    has_splits = bool(held_out_beside_others(files)) and not any(".txt" in file.name for file in files)
    return found.is_file() or (bool(files) and not has_splits)


def _is_of(path: Path, kind: str) -> bool:
    """Whether a file's name ends as those that are read."""
    return path.name.endswith(SUFFIXES[kind]) and path.is_file()


def drawn(documents: list[T], count: int | None, *seed: object) -> list[T]:
    """Sample at most `count` of the documents and keep their order."""
    if count is None or count >= len(documents):
        return documents
    chosen = stable_random(*seed).sample(range(len(documents)), count)
    return [documents[index] for index in sorted(chosen)]


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
            raise DataError(f"{where}: field {text_field!r} is not text but {type(text).__name__}")
        if text and text.strip():
            check_characters(text, text_field, where)
            yield text


def split_documents(documents: Iterable[str], *, validation_fraction: float, test_fraction: float) -> TextCorpus:
    """Distribute documents over the splits by a hash of their text, so that equal ones are in the same split.

    The split does not depend on other documents, so it stays when the corpus grows. The fractions are met on average.

    Raises DataError if there are no training documents.
    """
    splits: dict[str, list[str]] = {split: [] for split in SPLITS}
    for document in documents:
        splits[split_of(document, validation_fraction, test_fraction)].append(document)
    if not splits["train"]:
        raise DataError(
            f"there are no documents to train on ({len(splits['validation'])} for validation, {len(splits['test'])} "
            "for test); give more text, or smaller validation_fraction and test_fraction"
        )
    return TextCorpus(**splits)


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
