"""A parallel corpus of rows: local files, or a data set of the Hub; in memory, or streamed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hf_gpipe.data.fields import PLACEHOLDER
from hf_gpipe.data.files import files_of
from hf_gpipe.data.memory import corpus_in_memory
from hf_gpipe.data.pairs import Corpus
from hf_gpipe.data.parts import Subset, fields_of, local_parts
from hf_gpipe.data.streamed import StreamedCorpus, streamed_corpus
from hf_gpipe.errors import DataError

LOCAL_KINDS = ("jsonl", "csv", "parquet", "parallel")
ROW_KINDS = (*LOCAL_KINDS, "hub")


def rows_corpus(
    *,
    kind: str,
    path: str,
    target_path: str | None = None,
    delimiter: str | None = None,
    subset: Subset = None,
    revision: str | None = None,
    source_field: str = "source",
    target_field: str = "target",
    language_field: str | None = None,
    languages: Sequence[str] = (),
    split_by: str = "source",
    direction: str | None = None,
    english: str | None = None,
    target_tag: bool = False,
    skip_empty: bool | None = None,
    max_examples: int | None = None,
    max_held_out: int | None = None,
    validation_fraction: float = 0.05,
    test_fraction: float = 0.05,
    seed: int = 0,
    streaming: bool = False,
    temperature: float = 1.0,
    counts: Mapping[str, int] | None = None,
    shuffle_buffer: int = 1000,
    order_seed: int = 0,
) -> Corpus | StreamedCorpus:
    """The pairs of local files or of a data set of the Hub.

    "{language}" in a path, a subset or a field stands for each of `languages`, which are read one after another; in
    what order and which of them, `hf_gpipe.data.parts` says.

    Args:
        kind: "jsonl", "csv", "parquet", "parallel" or "hub".
        path: a file, a directory of files, or wildcards; of "hub" the id or the directory of a data set.
        target_path: the same of the target's files, of the kind "parallel".
        delimiter: between values, of the kind "csv"; None: a tab in files called .tsv, a comma in others.
        subset: of the kind "hub", as `hub_parts` says.
        revision: of the kind "hub".
        source_field, target_field, language_field, split_by, direction, english, target_tag: as `PairFields` says;
            files of the kind "parallel" have no fields to name.
        languages: those to keep, in this order; none: all.
        skip_empty: whether rows without text on one side are left out; None: of the kinds "parallel" and "hub" only.
        max_examples: how many pairs to draw; None: all. A stream draws none.
        max_held_out, validation_fraction, test_fraction: as `corpus_in_memory` and `streamed_corpus` say.
        seed: of the draw.
        streaming: whether pairs are read while they are trained on.
        temperature, counts, shuffle_buffer: of a stream, as `streamed_corpus` says.
        order_seed: of the order of a stream.

    Raises:
        DataError: whatever cannot be read or followed; names the file and the line, or the option.
    """
    _check_paths(kind, path, target_path)
    if streaming and max_examples is not None:
        raise DataError(
            f"max_examples is {max_examples}, and a stream has no end to draw from; leave it out, or set streaming: "
            "false"
        )
    fields = fields_of(
        kind,
        source_field=source_field,
        target_field=target_field,
        language_field=language_field,
        split_by=split_by,
        direction=direction,
        english=english,
        target_tag=target_tag,
        skip_empty=skip_empty,
    )
    if kind == "hub":
        # Here, for the library takes half a second to load, in every process.
        from hf_gpipe.data.hub import hub_parts

        parts = hub_parts(
            path=path, subset=subset, revision=revision, streaming=streaming, languages=languages, fields=fields
        )
    else:
        parts = local_parts(
            kind, path=path, target_path=target_path, delimiter=delimiter, languages=languages, fields=fields
        )
    if streaming:
        return streamed_corpus(
            parts,
            fields,
            name=path,
            languages=languages,
            temperature=temperature,
            counts=counts,
            shuffle_buffer=shuffle_buffer,
            max_held_out=max_held_out,
            validation_fraction=validation_fraction,
            test_fraction=test_fraction,
            seed=order_seed,
        )
    return corpus_in_memory(
        parts,
        fields,
        name=path,
        languages=languages,
        max_examples=max_examples,
        max_held_out=max_held_out,
        validation_fraction=validation_fraction,
        test_fraction=test_fraction,
        seed=seed,
    )


def check_files(kind: str, path: str, target_path: str | None, languages: Sequence[str]) -> None:
    """Raise DataError where files or a directory that a corpus of rows names are not there; reads none of them."""
    _check_paths(kind, path, target_path)
    if kind == "hub":
        is_a_directory = Path(path).is_absolute() or path.startswith((".", "~"))
        if is_a_directory and PLACEHOLDER not in path and not Path(path).is_dir():
            raise DataError(f"data.path: there is no directory {path} (looked in {Path.cwd()}); correct the path")
        return
    for key, name in (("data.path", path), ("data.target_path", target_path if kind == "parallel" else None)):
        for language in languages if name and PLACEHOLDER in name else [""]:
            if name:
                files_of(name.replace(PLACEHOLDER, language), kind, key)


def _check_paths(kind: str, path: str, target_path: str | None) -> None:
    if not path:
        raise DataError(f"a {kind} corpus needs `path`, the {'data set' if kind == 'hub' else 'file'} with its pairs")
    if kind == "parallel" and not target_path:
        raise DataError("a parallel corpus needs `target_path`, the file with the translations of the lines of `path`")
