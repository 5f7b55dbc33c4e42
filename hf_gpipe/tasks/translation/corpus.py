"""The corpus of pairs of a recipe. Unless it is streamed, it is read once, cached, and memory-mapped from then on."""

from __future__ import annotations

import heapq
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from typing_extensions import TypedDict

from hf_gpipe import strict_json
from hf_gpipe.data.deterministic import SPLITS, split_of, stable_fraction
from hf_gpipe.data.parts import Part
from hf_gpipe.data.prepared import BATCH_ROWS, cached, fingerprint, read_table, table_writer
from hf_gpipe.data.splits import Corpus, check_training, held_out_of
from hf_gpipe.errors import DataError
from hf_gpipe.progress import progress
from hf_gpipe.recipe import DataSection
from hf_gpipe.tasks.translation.cldr import cldr_corpus
from hf_gpipe.tasks.translation.fields import PairFields
from hf_gpipe.tasks.translation.pairs import (
    Pair,
    PairTable,
    count_languages,
    language_tag,
    texts_of,
)
from hf_gpipe.tasks.translation.reader import PairReader, tags_of, warn_of_few
from hf_gpipe.tasks.translation.sources import file_parts, hub_parts
from hf_gpipe.tasks.translation.stream import streamed_corpus

logger = logging.getLogger(__name__)

#: Keys that decide how pairs are used, but not which pairs the corpus has.
_NOT_OF_THE_PAIRS = (
    *("max_source_tokens", "max_target_tokens", "temperature", "streaming", "counts", "shuffle_buffer", "made_by"),
    "language_codes",
)


class _About(TypedDict):
    """The content of about.json beside the pairs."""

    languages: list[str]
    tags: bool
    empty: dict[str, strict_json.Number]


def build_corpus(data: DataSection, order_seed: int = 0) -> Corpus[Pair]:
    """Build the corpus of a recipe's data section.

    Args:
        data: the section, of any kind except "text".
        order_seed: seed of the order of a stream.

    Raises:
        DataError: data that cannot be read, or keys that do not fit; names the file and the line, or the key.
    """
    if data.kind == "cldr":
        return cldr_corpus(data)
    fields = PairFields(data)
    parts = hub_parts(data, fields) if data.kind == "hub" else file_parts(data, fields)
    return streamed_corpus(parts, fields, data, order_seed) if data.streaming else read_corpus(parts, fields, data)


def read_corpus(parts: Sequence[Part], fields: PairFields, data: DataSection) -> Corpus[Pair]:
    """Read all parts, or find them in the cache.

    Validation and test pairs come from a part's own splits, unchanged; if a part has no such split, a share of its
    training rows is held out, chosen by the hash of their split key.

    Raises:
        DataError: rows that are not pairs, a language without pairs, or no training pairs.
    """
    keys = {key: value for key, value in vars(data).items() if key not in _NOT_OF_THE_PAIRS}
    # Entries of "pairs" alone, of earlier releases, have no languages of the sides.
    key = fingerprint("pairs with languages", keys, [[part.language, part.identity()] for part in parts])
    folder = cached("pairs", key, lambda folder: _write(folder, parts, fields, data))
    about = strict_json.read(folder / "about.json", _About, error=DataError)
    for name, number in about["empty"].items():
        logger.warning("%s: %d rows without text on one side were left out", name, number)
    splits = {split: PairTable(read_table(folder / f"{split}.arrow"), f"{key}-{split}") for split in SPLITS}
    counts = {split: count_languages(pairs) for split, pairs in splits.items()}
    total = sum(counts.values(), Counter())
    of_corpus = [language for language in about["languages"] if language in total]
    warn_of_few(counts, of_corpus, total)
    tags = [language_tag(target) for target in fields.targets(about["languages"])] if about["tags"] else []
    return Corpus(**splits, languages=of_corpus, target_tags=tags, texts_of=texts_of)


def _write(folder: Path, parts: Sequence[Part], fields: PairFields, data: DataSection) -> None:
    """Write the splits and their metadata."""
    tags = tags_of(parts, fields, data.languages)
    # A language in a data set's own splits may still have no training pairs.
    train, held_out = PairReader(fields, data.languages, tags), PairReader(fields, data.languages, tags)
    drawn = _drawn_places(parts, train, data)
    kept: Counter[tuple[str, str]] = Counter()
    counts, blocks = dict.fromkeys(SPLITS, 0), {split: list[Pair]() for split in SPLITS}
    with ExitStack() as stack:
        streams = {
            split: stack.enter_context(table_writer(folder / f"{split}.arrow", PairTable.SCHEMA)) for split in SPLITS
        }

        def flush(split: str) -> None:
            if blocks[split]:
                streams[split].write_batch(PairTable.batch_of(blocks[split]))
                blocks[split].clear()

        def add(split: str, pair: Pair) -> None:
            if split != "train" and data.max_held_out is not None:
                kept[split, pair.language] += 1
                if kept[split, pair.language] > data.max_held_out:
                    return
            counts[split] += 1
            blocks[split].append(pair)
            if len(blocks[split]) == BATCH_ROWS:
                flush(split)

        for place, part in enumerate(parts):
            fractions = held_out_of(part.held_out, data)
            for pair in _shown(part, train.pairs(part, part.train())) if drawn is None else drawn[place]:
                add(split_of(pair.split_key, *fractions), pair)
            for split, open_rows in part.held_out.items():
                for pair in _shown(part, held_out.pairs(part, open_rows())):
                    add(split, pair)
        for split in SPLITS:
            flush(split)
    train.check(str(data.path))
    check_training(counts, "pairs")
    languages = data.languages or sorted(train.languages | held_out.languages)
    about = {"languages": list(languages), "tags": tags, "empty": dict(train.num_empty + held_out.num_empty)}
    (folder / "about.json").write_text(json.dumps(about))


def _shown(part: Part, pairs: Iterable[Pair]) -> Iterable[Pair]:
    return progress(pairs, f"reading {part.name}", "pairs")


def _drawn_places(parts: Sequence[Part], read: PairReader, data: DataSection) -> list[list[Pair]] | None:
    """The `max_examples` pairs sampled from all parts, for each part in order; None: all pairs are taken."""
    if data.max_examples is None:
        return None
    every = ((place, pair) for place, part in enumerate(parts) for pair in _shown(part, read.pairs(part, part.train())))
    of_part: list[list[Pair]] = [[] for _ in parts]
    for place, pair in _drawn(every, data.max_examples, data.seed):
        of_part[place].append(pair)
    return of_part


def _drawn(pairs: Iterator[tuple[int, Pair]], count: int, seed: int) -> list[tuple[int, Pair]]:
    """Sample at most `count` of the pairs and keep their order; only these are held in memory.

    The sample is the pairs whose positions have the lowest hashes.
    """
    keyed = ((stable_fraction(f"max_examples\x1f{seed}\x1f{place}"), place, pair) for place, pair in enumerate(pairs))
    chosen = heapq.nsmallest(count, keyed, key=lambda entry: entry[:2])
    return [pair for _, _, pair in sorted(chosen, key=lambda entry: entry[1])]
