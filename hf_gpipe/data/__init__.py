"""Corpora, tokenizers, and the mini-batches made of both.

The words: a *row* is a record of a file or data set; a *pair* is a source and its translation, made from a row; an
*example* is a pair, a block of text or a conversation, as token ids. The modules, in the order in which data passes
through them:

    files, formats, hub      which files a path means; rows of files, and of data sets of the Hub
    fields, image_files      the fields of rows; the images of rows
    splits, rows             a corpus: items of any kind in three splits, or rows as they are
    parts, sampling          rows by language, which can be read from any place on; sampling of languages
    chats, chat_labels       conversations and preferences in any form; their ids, and which of them are learnt
    encoded                  rows to examples, kept in the cache
    chat_examples, answers   those of conversations; those of prompts with answers
    packed_rows              which rows share a row
    store                    the cache of prepared data
    tokenizer                training a tokenizer
    batches, collate         the examples of each mini-batch; examples to tensors
"""

from typing import Any

from hf_gpipe.data.batches import length_bucketed_batches as length_bucketed_batches
from hf_gpipe.data.batches import shuffled_batches as shuffled_batches
from hf_gpipe.data.chat_examples import ChatExamples as ChatExamples
from hf_gpipe.data.chat_examples import SFTCollator as SFTCollator
from hf_gpipe.data.chat_examples import SFTExamples as SFTExamples
from hf_gpipe.data.collate import ExampleCollator as ExampleCollator
from hf_gpipe.data.collate import PairCollator as PairCollator
from hf_gpipe.data.splits import Corpus as Corpus
from hf_gpipe.data.tokenizer import train_tokenizer as train_tokenizer
from hf_gpipe.registry import task_module

#: Names that stand in the modules of their tasks.
_OF_TASKS = {
    **dict.fromkeys(("LabelCollator", "LabelledExamples"), "classify"),
    **dict.fromkeys(("PreferenceCollator", "PreferenceExamples"), "dpo"),
    "build_corpus": "translation.corpus",
    "Pair": "translation.pairs",
    **dict.fromkeys(("PairStream", "StreamedCorpus"), "translation.stream"),
    **dict.fromkeys(("StreamedExamples", "TokenizedPairs"), "translation.tokenized"),
}


def __getattr__(name: str) -> Any:
    if name not in _OF_TASKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(task_module(_OF_TASKS[name]), name)
