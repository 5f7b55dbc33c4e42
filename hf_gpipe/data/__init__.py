"""Parallel corpora, tokenizer training, mini-batches and collation."""

from hf_gpipe.data.batches import length_bucketed_batches, shuffled_batches
from hf_gpipe.data.build import build_corpus
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.pairs import Corpus, Pair
from hf_gpipe.data.stream import PairStream
from hf_gpipe.data.streamed import StreamedCorpus
from hf_gpipe.data.tokenized import StreamedRows, TokenizedPairs, encode_sources
from hf_gpipe.data.tokenizer import train_tokenizer

__all__ = [
    "Corpus",
    "Pair",
    "PairCollator",
    "PairStream",
    "StreamedCorpus",
    "StreamedRows",
    "TokenizedPairs",
    "build_corpus",
    "encode_sources",
    "length_bucketed_batches",
    "shuffled_batches",
    "train_tokenizer",
]
