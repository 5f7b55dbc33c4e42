"""The entry that a recipe's data section goes through."""

from __future__ import annotations

import json

import pytest

from hf_gpipe.errors import DataError
from hf_gpipe.recipe import DataSection
from hf_gpipe.tasks.translation.cldr import cldr_corpus
from tests.data.sections import corpus


def test_kind_chooses_the_corpus(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps({"source": f"a{n}", "target": f"b{n}"}) for n in range(20)))
    section = DataSection(kind="cldr", languages=["de"], examples_per_language=200)
    assert corpus(kind="cldr", languages=["de"], examples_per_language=200) == cldr_corpus(section)
    assert corpus(kind="jsonl", path=str(path)).languages == ["all"]


def test_a_missing_path_is_an_error():
    with pytest.raises(DataError, match="path is missing and kind is jsonl; give the file"):
        corpus(kind="jsonl")
