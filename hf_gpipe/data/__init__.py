"""Corpora, tokenizers, and the mini-batches made of both.

The words: a *row* is a record of a file or data set; a *pair* is a source and its translation, made from a row; an
*example* is a pair, a block of text or a conversation, as token ids. The modules, in the order in which data passes
through them:

    files, formats, hub    which files a path means; rows of files, and of data sets of the Hub
    sources                parts of a corpus: a language's rows, with a state to resume from
    fields, reader, pairs  rows to pairs; splits
    corpus, stream         all pairs at once, memory-mapped; or pairs read while they are trained on
    cldr/, text            generated pairs; documents
    chats, chat_labels, chat_examples   conversations; which tokens are learnt; conversations to examples
    labelled               texts with a class, to examples
    preferences            a prompt with a chosen and a rejected answer, to examples
    encoded                what both kinds of examples have in common
    store                  the cache of prepared data
    threads                work in threads
    tokenizer, tokenized   training a tokenizer; pairs to examples
    sampling, batches      the examples of an epoch, and of each mini-batch
    collate                examples to tensors
"""

from hf_gpipe.data.batches import length_bucketed_batches, shuffled_batches
from hf_gpipe.data.chat_examples import ChatExamples
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.corpus import build_corpus
from hf_gpipe.data.labelled import LabelCollator, LabelledExamples
from hf_gpipe.data.pairs import Corpus, Pair
from hf_gpipe.data.preferences import PreferenceCollator, PreferenceExamples
from hf_gpipe.data.sft import SFTCollator, SFTExamples
from hf_gpipe.data.stream import PairStream, StreamedCorpus
from hf_gpipe.data.tokenized import StreamedExamples, TokenizedPairs
from hf_gpipe.data.tokenizer import train_tokenizer

__all__ = [
    "ChatExamples",
    "Corpus",
    "LabelCollator",
    "LabelledExamples",
    "Pair",
    "PairCollator",
    "PairStream",
    "PreferenceCollator",
    "PreferenceExamples",
    "SFTCollator",
    "SFTExamples",
    "StreamedCorpus",
    "StreamedExamples",
    "TokenizedPairs",
    "build_corpus",
    "length_bucketed_batches",
    "shuffled_batches",
    "train_tokenizer",
]
