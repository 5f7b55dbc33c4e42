"""A part of a corpus: the same share of each language's training pairs."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from operator import itemgetter
from pathlib import Path
from typing import Any

from hf_gpipe.data.deterministic import split_of, stable_fraction
from hf_gpipe.data.formats import read_jsonl
from hf_gpipe.errors import UserError
from hf_gpipe.recipe import DataSection


def part_of(data: DataSection, share: float, folder: Path) -> Path:
    """Write a part of a corpus of the kind jsonl, unless it is there; returns its path.

    Of each language it has a share of the training pairs, those with the lowest hash of the language and the English
    sentence, so a larger share contains a smaller one. All pairs for validation and test are kept. Rows are in the
    order of their hashes: where `data.max_held_out` limits the pairs for validation and test, they are a sample.

    Raises:
        UserError: a share that is none, or a corpus of another kind.
    """
    if not 0 < share <= 1:
        raise UserError(f"--share {share:g}: it must be above 0 and at most 1")
    path = Path(str(data.path))
    if data.kind != "jsonl" or data.language_field is None or not path.is_file():
        raise UserError(
            f"--share {share:g} needs a corpus in one file of the kind jsonl with data.language_field, and data.kind "
            f"is {data.kind}, data.path {data.path}; leave it out, or use data.max_examples"
        )
    target = folder / f"{path.name.removesuffix('.gz').removesuffix('.jsonl')}-{share:g}.jsonl.gz"
    if share == 1 or target.exists():
        return path if share == 1 else target
    key = data.source_field if data.split_by == "source" else data.target_field
    rows: list[tuple[float, dict[str, Any]]] = []
    of_language: dict[str, list[tuple[float, dict[str, Any]]]] = defaultdict(list)
    for _, row in read_jsonl(path):
        language = row[data.language_field]
        place = stable_fraction(f"share\x1f{language}\x1f{row[key]}")
        is_training = split_of(row[key].strip(), data.validation_fraction, data.test_fraction) == "train"
        (of_language[language] if is_training else rows).append((place, row))
    for own in of_language.values():
        rows += sorted(own, key=itemgetter(0))[: math.ceil(share * len(own))]
    folder.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}")
    with temporary.open("wb") as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as written:
        for _, row in sorted(rows, key=itemgetter(0)):
            written.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
    temporary.rename(target)
    return target
