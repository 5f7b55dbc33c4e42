"""Directories in the form that data sets have on the Hub: a README that names subsets and splits, and Parquet files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

Splits = Mapping[str, int]
"""How many rows each split has."""


def translation(first: str, second: str, split: str, number: int) -> dict[str, Any]:
    """A row as of OPUS-100 and WMT."""
    return {
        "translation": {code: f"{code} of {first}-{second}, {split} {number}" for code in (first, second)},
    }


def write(
    folder: Path, subsets: Mapping[str, Splits], *, shards: int = 1, has_counts: bool = True, row: Any = translation
) -> Path:
    """Write a data set; each subset "de-en" has rows {"translation": {"de": ..., "en": ...}}.

    Args:
        folder: to write to.
        subsets: the splits of each subset.
        shards: files of each training split.
        has_counts: whether the README says how many rows there are.
        row: (first code, second code, split, number) -> row.
    """
    configs, infos = [], []
    for subset, splits in subsets.items():
        first, second = subset.split("-")
        (folder / subset).mkdir(parents=True)
        configs.append(f"- config_name: {subset}\n  data_files:")
        infos.append(
            f"- config_name: {subset}\n  features:\n  - name: translation\n    dtype:\n      translation:\n"
            f"        languages:\n        - {first}\n        - {second}\n  splits:"
        )
        for split, count in splits.items():
            rows = [row(first, second, split, number) for number in range(count)]
            pieces = shards if split == "train" else 1
            for piece in range(pieces):
                own = rows[piece * count // pieces : (piece + 1) * count // pieces]
                name = folder / subset / f"{split}-{piece:05}-of-{pieces:05}.parquet"
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(own), name, row_group_size=11)
            configs.append(f"  - split: {split}\n    path: {subset}/{split}-*")
            infos.append(f"  - name: {split}\n    num_bytes: 1\n    num_examples: {count}")
    lines = ["---", "configs:", *configs, *(["dataset_info:", *infos] if has_counts else []), "---", "# A data set", ""]
    (folder / "README.md").write_text("\n".join(lines))
    return folder
