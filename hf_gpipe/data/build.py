"""The corpus a recipe asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hf_gpipe.data.cldr import cldr_corpus
from hf_gpipe.data.jsonl import jsonl_corpus
from hf_gpipe.data.pairs import Corpus
from hf_gpipe.errors import DataError, nearest

KINDS = ("cldr", "jsonl")


def build_corpus(
    *,
    kind: str,
    seed: int = 0,
    languages: Sequence[str] = (),
    num_languages: int | None = None,
    rank_seed: int | None = None,
    validation_fraction: float = 0.05,
    test_fraction: float = 0.05,
    target_tag: bool = False,
    templates: Sequence[str] = (),
    direction: str = "to_english",
    max_number: int = 999,
    examples_per_language: int = 2000,
    min_examples_per_language: int = 100,
    power_law_exponent: float = 0.0,
    path: str | Path | None = None,
    source_field: str = "source",
    target_field: str = "target",
    language_field: str | None = None,
    split_by: str = "source",
    max_examples: int | None = None,
) -> Corpus:
    """The corpus of `kind` "cldr" (cldr_corpus) or "jsonl" (jsonl_corpus), which say what each argument means.

    Arguments of the other kind are left aside, so that a recipe keeps both when its kind is switched.
    Raises DataError for an unknown kind, a jsonl corpus without a path, and whatever the corpus cannot use.
    """
    if kind == "cldr":
        return cldr_corpus(
            languages=languages,
            num_languages=num_languages,
            rank_seed=rank_seed,
            templates=templates,
            direction=direction,
            max_number=max_number,
            examples_per_language=examples_per_language,
            min_examples_per_language=min_examples_per_language,
            power_law_exponent=power_law_exponent,
            validation_fraction=validation_fraction,
            test_fraction=test_fraction,
            target_tag=target_tag,
            seed=seed,
        )
    if kind == "jsonl":
        if not path:
            raise DataError("a jsonl corpus needs `path`, the file with its pairs")
        return jsonl_corpus(
            path=path,
            source_field=source_field,
            target_field=target_field,
            language_field=language_field,
            languages=languages,
            split_by=split_by,
            target_tag=target_tag,
            max_examples=max_examples,
            validation_fraction=validation_fraction,
            test_fraction=test_fraction,
            seed=seed,
        )
    raise DataError(f"data kind {kind!r} is unknown{nearest(kind, KINDS)}; choose from {', '.join(KINDS)}")
