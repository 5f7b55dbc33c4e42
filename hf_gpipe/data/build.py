"""The corpus a recipe asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hf_gpipe.data.cldr import cldr_corpus
from hf_gpipe.data.pairs import Corpus
from hf_gpipe.data.parts import Subset
from hf_gpipe.data.rows import ROW_KINDS, rows_corpus
from hf_gpipe.data.streamed import StreamedCorpus
from hf_gpipe.errors import DataError, nearest

KINDS = ("cldr", *ROW_KINDS)


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
    direction: str | None = None,
    max_number: int = 999,
    examples_per_language: int = 2000,
    min_examples_per_language: int = 100,
    power_law_exponent: float = 0.0,
    path: str | Path | None = None,
    target_path: str | None = None,
    delimiter: str | None = None,
    subset: Subset = None,
    revision: str | None = None,
    source_field: str = "source",
    target_field: str = "target",
    language_field: str | None = None,
    split_by: str = "source",
    english: str | None = None,
    skip_empty: bool | None = None,
    max_examples: int | None = None,
    max_held_out: int | None = None,
    streaming: bool = False,
    temperature: float = 1.0,
    counts: Mapping[str, int] | None = None,
    shuffle_buffer: int = 1000,
    order_seed: int = 0,
) -> Corpus | StreamedCorpus:
    """The corpus of `kind` "cldr" (cldr_corpus), or of rows (rows_corpus), which say what each argument means.

    Arguments of other kinds are left aside, so that a recipe keeps all when its kind is switched. `temperature` is a
    stream's only: of a corpus in memory, whoever makes mini-batches draws by it.
    Raises DataError for an unknown kind, rows without a path, and whatever the corpus cannot use.
    """
    if kind == "cldr":
        return cldr_corpus(
            languages=languages,
            num_languages=num_languages,
            rank_seed=rank_seed,
            templates=templates,
            direction=direction or "to_english",
            max_number=max_number,
            examples_per_language=examples_per_language,
            min_examples_per_language=min_examples_per_language,
            power_law_exponent=power_law_exponent,
            validation_fraction=validation_fraction,
            test_fraction=test_fraction,
            target_tag=target_tag,
            seed=seed,
        )
    if kind in ROW_KINDS:
        return rows_corpus(
            kind=kind,
            path=str(path or ""),
            target_path=target_path,
            delimiter=delimiter,
            subset=subset,
            revision=revision,
            source_field=source_field,
            target_field=target_field,
            language_field=language_field,
            languages=languages,
            split_by=split_by,
            direction=direction,
            english=english,
            target_tag=target_tag,
            skip_empty=skip_empty,
            max_examples=max_examples,
            max_held_out=max_held_out,
            validation_fraction=validation_fraction,
            test_fraction=test_fraction,
            seed=seed,
            streaming=streaming,
            temperature=temperature,
            counts=counts,
            shuffle_buffer=shuffle_buffer,
            order_seed=order_seed,
        )
    raise DataError(f"data kind {kind!r} is unknown{nearest(kind, KINDS)}; choose from {', '.join(KINDS)}")
