"""A stream goes on exactly from any place, and its order is a function of seeds and places."""

from __future__ import annotations

import json
import os
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.data import PairStream
from hf_gpipe.data.formats import read_jsonl
from hf_gpipe.data.hub import HubRows
from hf_gpipe.errors import CheckpointError
from hf_gpipe.recipe import DataSection
from hf_gpipe.tasks.translation.fields import PairFields
from hf_gpipe.tasks.translation.reader import PairReader
from hf_gpipe.tasks.translation.sources import FileRows, Part
from hf_gpipe.tasks.translation.stream import BlockReader
from tests.data import hub_directories, test_formats
from tests.data.sections import corpus as build_corpus

LENGTH = 900
SIZES = {"de": 90, "fr": 31, "yo": 5}


@cache
def folder() -> Path:
    """Three languages in two or three files each: as a data set of the Hub's form, and as files of each kind."""
    path = Path(mkdtemp(dir=os.environ["HF_DATASETS_CACHE"]))  # removed at the end, as tests/conftest.py says
    sizes = {f"{code}-zz": {"train": size, "validation": 2} for code, size in SIZES.items()}
    hub_directories.write(path / "hub", sizes, shards=3)
    for kind in ("jsonl", "csv", "parquet"):
        for code, size in SIZES.items():
            (path / kind / code).mkdir(parents=True)
            rows = [{"source": f"{code} {n}", "target": f"en {n}"} for n in range(size)]
            for piece in range(2):
                test_formats.write(path / kind / code / f"{piece}.{kind}", rows[piece::2])
    return path


def stream(kind: str, buffer: int = 16, seed: int = 0) -> PairStream:
    return opened(kind, buffer, seed).fresh()


@cache
def opened(kind: str, buffer: int, seed: int) -> PairStream:
    if kind == "hub":
        options = {"path": str(folder() / "hub"), "subset": "{language}-zz", "source_field": "translation.{language}"}
        options["target_field"] = "translation.zz"
    else:
        options = {"path": str(folder() / kind / "{language}"), "counts": SIZES}
    return build_corpus(
        kind=kind,
        languages=list(SIZES),
        streaming=True,
        temperature=5.0,
        shuffle_buffer=buffer,
        order_seed=seed,
        test_fraction=0.1,
        **options,
    ).train


@cache
def whole(kind: str, buffer: int) -> list[str]:
    return [pair.source for pair in islice(stream(kind, buffer), LENGTH)]


def ahead(pairs: PairStream, count: int) -> list[str]:
    return [pair.source for pair in islice(pairs, count)]


@pytest.mark.parametrize("kind", ["hub", "jsonl", "csv", "parquet"])
@settings(max_examples=6, deadline=None)
@given(cuts=st.lists(st.integers(0, 150), min_size=1, max_size=3), buffer=st.sampled_from([1, 5, 16, 1000]))
def test_going_on_is_exact_wherever_it_was_left(kind, cuts, buffer):
    found: list[str] = []
    state = None
    for cut in [*cuts, 60]:
        pairs = stream(kind, buffer)
        if state is not None:
            pairs.load_state_dict(json.loads(state))
        found += ahead(pairs, cut)
        state = json.dumps(pairs.state_dict())
    assert found == whole(kind, buffer)[: len(found)]


@pytest.mark.parametrize("kind", ["hub", "jsonl"])
def test_a_place_can_be_taken_back_in_the_same_stream(kind):
    pairs = stream(kind)
    ahead(pairs, 100)
    place = pairs.state_dict()
    following = ahead(pairs, 333)
    pairs.load_state_dict(place)
    assert ahead(pairs, 333) == following
    assert len(json.dumps(place)) < 3000


def test_a_sample_does_not_disturb_the_stream():
    pairs = stream("hub")
    ahead(pairs, 33)
    sampled = [pair.source for pair in islice(pairs.fresh(), 150)]
    assert sampled == whole("hub", 16)[:150]
    assert ahead(pairs, 150) == whole("hub", 16)[33:183]


def test_several_iterators_share_one_place():
    pairs = stream("jsonl")
    assert ahead(pairs, 5) + ahead(pairs, 5) == whole("jsonl", 16)[:10]


def test_seeds_and_passes_have_orders_of_their_own():
    assert whole("jsonl", 16)[:50] != ahead(stream("jsonl", seed=1), 50)
    german = [source for source in whole("jsonl", 1000) if source.startswith("de")]
    size = len(set(german))
    first, second = german[:size], german[size : 2 * size]
    assert set(first) == set(second)
    assert first != second
    assert first != sorted(first, key=lambda source: int(source[3:]))


@pytest.mark.parametrize("kind", ["hub", "jsonl"])
def test_passes_read_files_and_shards_in_other_orders(kind):
    # Blocks of one row are not shuffled, so that the order is that of the files.
    german = [source for source in whole(kind, 1) if source.startswith("de")]
    size = len(set(german))
    passes = [german[start : start + size] for start in range(0, len(german) - size, size)]
    assert len({tuple(one) for one in passes}) > 1
    assert len({tuple(sorted(one)) for one in passes}) == 1


def test_every_pass_holds_every_pair_once():
    for kind in ("hub", "csv"):
        for code in SIZES:
            found = [source for source in whole(kind, 5) if source.startswith(code)]
            size = len(set(found))
            for start in range(0, len(found) - size, size):
                assert len(set(found[start : start + size])) == size


def test_the_language_of_a_draw_depends_on_the_seed_and_its_number_alone():
    languages = [[pair.language for pair in islice(stream("jsonl", buffer), 200)] for buffer in (3, 16)]
    assert languages[0] == languages[1]


def test_data_that_have_moved_keep_their_order(tmp_path):
    found = []
    for name in ("here", "there"):
        folder = tmp_path / name
        folder.mkdir()
        for piece in range(3):
            rows = [{"source": f"{piece} {n}", "target": "x"} for n in range(9)]
            test_formats.write(folder / f"{piece}.jsonl", rows)
        corpus = build_corpus(kind="jsonl", path=str(folder), streaming=True, shuffle_buffer=4)
        found.append(ahead(corpus.train, 80))
    assert found[0] == found[1]


def test_a_place_in_another_stream_is_refused():
    place = stream("jsonl").state_dict()
    del place["languages"]["yo"]
    with pytest.raises(CheckpointError, match="of a stream of de, fr, and this one has de, fr, yo"):
        stream("jsonl").load_state_dict(place)


def test_rows_that_are_left_are_closed(tmp_path):
    """They stayed open until the program ended, once for every pass."""
    test_formats.write(tmp_path / "x.jsonl", [{"source": str(n), "target": "x"} for n in range(9)])
    closed = []

    class Rows(FileRows):
        def __iter__(self):
            try:
                yield from super().__iter__()
            finally:
                closed.append(self)

    part = Part("x", None, lambda: Rows([tmp_path / "x.jsonl"], read_jsonl))
    reader = BlockReader(
        part,
        PairReader(PairFields(DataSection(kind="jsonl", path="x")), [], False),
        (0.0, 0.0),
        rows_of_block=4,
        seed=0,
    )
    next(reader)
    assert not closed
    reader.load_state_dict(reader.state_dict())
    assert len(closed) == 1


def test_a_place_among_other_files_or_shards_is_refused(tmp_path):
    for name, rows in (("a", 3), ("b", 2)):
        test_formats.write(tmp_path / f"{name}.jsonl", [{"source": f"{n}", "target": f"{n}"} for n in range(rows)])
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    state = FileRows(files, read_jsonl).state_dict()
    with pytest.raises(CheckpointError, match="had 2 files, and now it has 1"):
        FileRows(files[:1], read_jsonl).load_state_dict(state)
    data = Dataset.from_list([{"a": n} for n in range(6)])
    state = HubRows("here", data.to_iterable_dataset(num_shards=3)).state_dict()
    with pytest.raises(CheckpointError, match="here had 3 shards, and now it has 2"):
        HubRows("here", data.to_iterable_dataset(num_shards=2)).load_state_dict(state)
