"""The entry that a recipe's fields go through."""

from __future__ import annotations

import json

import pytest

from hf_gpipe.data import build_corpus
from hf_gpipe.data.cldr import cldr_corpus
from hf_gpipe.errors import DataError


def test_kind_chooses_the_corpus(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps({"source": f"a{n}", "target": f"b{n}"}) for n in range(20)))
    assert build_corpus(kind="cldr", languages=["de"], path=str(path)) == cldr_corpus(languages=["de"])
    from_file = build_corpus(kind="jsonl", path=str(path), templates=["month"], max_number=3)
    assert from_file.languages == ["all"]


def test_unknown_kind_and_missing_path_are_refused():
    with pytest.raises(
        DataError, match=r"kind 'json' is unknown; did you mean 'jsonl'\?; choose from cldr, jsonl, csv, "
    ):
        build_corpus(kind="json")
    with pytest.raises(DataError, match="needs `path`"):
        build_corpus(kind="jsonl")
