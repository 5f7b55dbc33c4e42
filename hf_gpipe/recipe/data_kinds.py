"""Which keys of the data section each kind of corpus uses."""

from __future__ import annotations

_ALWAYS = ("kind", "seed", "validation_fraction", "test_fraction", "max_target_tokens")
_PAIRS = ("languages", "temperature", "target_tag", "direction", "max_source_tokens")
_READ_PAIRS = ("path", "english", "split_by", "skip_empty", "max_examples", "max_held_out")
_STREAM = ("streaming", "counts", "shuffle_buffer")
_FIELDS = ("source_field", "target_field", "language_field")
_HUB = ("subset", "revision")
_CLDR = (
    *("num_languages", "rank_seed", "templates", "max_number"),
    *("examples_per_language", "min_examples_per_language", "power_law_exponent"),
)

#: Kinds of pairs that are read from local files.
FILE_KINDS = ("jsonl", "csv", "parquet", "parallel")
#: Kinds of pairs that are read, from files or from a data set.
READ_KINDS = (*FILE_KINDS, "hub")

_READ = (*_ALWAYS, *_PAIRS, *_READ_PAIRS, *_STREAM)

#: The keys that have an effect, for each kind; any other key is an error where its value is not the default.
KEYS: dict[str, tuple[str, ...]] = {
    "cldr": (*_ALWAYS, *_PAIRS, *_CLDR),
    "jsonl": (*_READ, *_FIELDS),
    "csv": (*_READ, *_FIELDS, "delimiter"),
    "parquet": (*_READ, *_FIELDS),
    "parallel": (*_READ, "target_path"),
    "hub": (*_READ, *_FIELDS, *_HUB),
    "text": (*_ALWAYS, "path", "text_field", "max_examples", *_HUB),
}
