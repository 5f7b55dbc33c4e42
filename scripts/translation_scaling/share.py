"""A part of a corpus: the same share of each language's pairs."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from pathlib import Path

from hf_gpipe.data.deterministic import stable_fraction
from hf_gpipe.data.formats import read_jsonl
from hf_gpipe.errors import UserError
from hf_gpipe.recipe import DataSection


def part_of(data: DataSection, share: float, folder: Path) -> Path:
    """Write a part of a corpus of the kind jsonl, unless it is there; returns its path.

    Of each language it has those pairs whose English sentence (`data.split_by`) has the lowest hash. So the parts of
    two languages have the same sentences wherever both have them, and a larger share contains a smaller one.

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
    if share == 1:
        return path
    suffix = ".jsonl.gz" if path.name.endswith(".gz") else ".jsonl"
    target = folder / f"{path.name.removesuffix(suffix)}-{share:g}.jsonl.gz"
    if target.exists():
        return target
    key = data.source_field if data.split_by == "source" else data.target_field
    rows = [row for _, row in read_jsonl(path)]
    places: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for place, row in enumerate(rows):
        places[row[data.language_field]].append((stable_fraction(f"share\x1f{row[key]}"), place))
    kept = sorted(place for own in places.values() for _, place in sorted(own)[: math.ceil(share * len(own))])
    folder.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}")
    with temporary.open("wb") as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as written:
        for place in kept:
            written.write((json.dumps(rows[place], ensure_ascii=False) + "\n").encode())
    temporary.rename(target)
    return target
