"""Monolingual text: documents for pretraining, and the blocks of tokens that they are cut into."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_gpipe.adapters.text_entries import text_entries, token_ids
from hf_gpipe.data.fields import text_in
from hf_gpipe.data.prepared import in_blocks
from hf_gpipe.data.splits import Corpus, read_splits
from hf_gpipe.errors import DataError
from hf_gpipe.from_recipe.held_out import HeldOut, HeldOutReport, evaluate_text
from hf_gpipe.from_recipe.tasks import Task
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.progress import progress
from hf_gpipe.recipe import DataSection, Recipe


def text_corpus(data: DataSection) -> Corpus[str]:
    """The documents of local files, or of a data set of the Hub.

    `data.path` is a file, wildcards, or a directory with files whose names end in .txt, .jsonl or .parquet, the first
    two perhaps in .gz; otherwise the Hub id of a data set, or a directory in its form. In a .txt file a document is a
    paragraph: lines up to a blank one; rows without text are left out. Equal documents are in the same split.

    Raises:
        DataError: no such files or data set, a name that ends otherwise, rows without the field, or no document to
            train on.
    """
    return read_splits(
        data,
        of_rows=lambda rows: filter(
            None, (text_in(row, data.text_field, where, may_be_empty=True) for where, row in rows)
        ),
        text_of=str,
        texts_of=lambda text: [text],
        what="documents",
    )


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
                for ids in token_ids(tokenizer(list(some), add_special_tokens=False, verbose=False)):
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
        return text_entries(block, labels=list(block))

    @property
    def lengths(self) -> list[int]:
        """The tokens of each block."""
        last = self._num_tokens - (len(self) - 1) * self._block_tokens
        return [*[self._block_tokens] * (len(self) - 1), last]


class _Text(Task):
    items, evaluating = "documents", "predicting the text"

    def read(self, recipe: Recipe) -> Corpus[str]:
        return text_corpus(recipe.data)

    def size(self, data: DataSection, corpus: Any) -> str:
        return f"{len(corpus.train)} training documents in blocks of {data.max_target_tokens} tokens"

    def rows(self, recipe: Recipe, split: Any, processor: Any) -> TokenBlocks:
        return TokenBlocks(split, processor, recipe.data.max_target_tokens)

    def measure(self, recipe: Recipe, pipe: Pipeline, held_out: HeldOut, processor: Any) -> HeldOutReport:
        return evaluate_text(pipe, held_out)


TASK = _Text()
