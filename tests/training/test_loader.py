"""The loader: languages drawn by temperature, mini-batches of target tokens, streams that are gone on with."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.checkpoint.digests import DIGESTS_FILE
from hf_gpipe.data import PairCollator
from hf_gpipe.data.sampling import draws_of
from hf_gpipe.errors import CheckpointError, DataError, UserError
from hf_gpipe.recipe.batch_size import BatchSize
from hf_gpipe.runtime.batches import tensors_of
from hf_gpipe.training import loader
from hf_gpipe.training.loader import MiniBatches
from tests.training.toy import CausalRows, Recorder, Rows, Stream, trainer, weights

COLLATE = PairCollator(pad_token_id=0)
STRATEGIES = ["random", "group_by_length"]


class OfLanguages(Rows):
    """Rows of a large and a small language."""

    def __init__(self, count: int = 24, seed: int = 0) -> None:
        super().__init__(count, seed)
        self.languages = ["large"] * (count - count // 6) + ["small"] * (count // 6)


class StatefulStream:
    """Rows without an end, or with one, that can be gone on with. Notes how many it has read."""

    def __init__(self, count: int = 24, *, endless: bool = False) -> None:
        self.rows, self.endless = Rows(count), endless
        self.number, self.num_read, self._loaded = 0, 0, False

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        if not self._loaded:
            self.number = 0
        self._loaded = False
        while self.endless or self.number < len(self.rows):
            row = self.rows[self.number % len(self.rows)]
            self.number += 1
            self.num_read += 1
            yield row

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number, self._loaded = state["number"], True


def same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
        for ours, theirs in zip(found, expected, strict=True)
    )


def num_targets(batch: Any) -> int:
    return int((batch["labels"] != -100).sum())


# ---------------------------------------------------------------------- map-style


@pytest.mark.parametrize(
    ("dataset", "size", "error"),
    [
        (Rows(8), BatchSize(4, 20), "needs mini-batches of so many rows; leave batch_tokens out"),
        (Rows(8), BatchSize(4), "needs the texts of each row, which .* a Rows has not"),
        (Stream(8), BatchSize(4), "an iterable dataset draws its rows itself"),
    ],
)
def test_an_order_without_duplicates_that_cannot_be_made(dataset: Any, size: BatchSize, error: str) -> None:
    """With a size in tokens, duplicates were kept without a word."""
    with pytest.raises(UserError, match=f"train_sampling_strategy='no_duplicates'.*{error}"):
        next(iter(MiniBatches(dataset, COLLATE, size, "no_duplicates")))


@pytest.mark.parametrize("order", ["sequential", *STRATEGIES])
@pytest.mark.parametrize("batch_tokens", [None, 20])
def test_an_epoch_from_any_mini_batch_on(order: str, batch_tokens: int | None) -> None:
    batches = MiniBatches(Rows(30), COLLATE, BatchSize(4, batch_tokens), order)
    for epoch in range(2):
        whole = list(batches.epoch(epoch))
        assert len(whole) == batches.count()
        assert sum(len(batch["labels"]) for batch in whole) == 30
        for start in range(len(whole) + 1):
            assert same(list(batches.epoch(epoch, start, batches.place(start))), whole[start:])


@pytest.mark.parametrize("order", STRATEGIES)
@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_every_epoch_has_as_many_mini_batches_of_about_as_many_tokens(order: str, temperature: float) -> None:
    """At another temperature the sums of the epochs differ, and the number of steps must not."""
    batches = MiniBatches(OfLanguages(90), COLLATE, BatchSize(4, 40), order, temperature=temperature)
    for epoch in range(3):
        sums = [num_targets(batch) for batch in batches.epoch(epoch)]
        assert len(sums) == batches.count()
        assert max(sums) - min(sums) <= 2 * 9, "the longest row has 9 target tokens"
    assert batches.count() == pytest.approx(sum(sums) / 40, abs=1)


@pytest.mark.parametrize("dataset", [Rows(9), Stream(9)], ids=["rows", "stream"])
@pytest.mark.parametrize("order", ["sequential", *STRATEGIES])
def test_a_whole_mini_batch_comes_before_the_rows_that_are_left_over(order: str, dataset: Any) -> None:
    """The first mini-batch was the one measured. By length their order is random, and it may have the left-over row."""
    made = [MiniBatches(dataset, COLLATE, BatchSize(4), order, seed=seed) for seed in range(8)]
    assert {len(batches.whole()["labels"]) for batches in made} == {4}
    first = {len(next(batches.epoch(0))["labels"]) for batches in made}
    assert first == ({1, 4} if order == "group_by_length" else {4})
    assert len(MiniBatches(dataset, COLLATE, BatchSize(20), order).whole()["labels"]) == 9


@pytest.mark.parametrize("order", STRATEGIES)
def test_a_small_language_comes_more_often(order: str) -> None:
    dataset = OfLanguages(60)
    drawn: Counter[str] = Counter()
    batches = MiniBatches(dataset, list_of, BatchSize(4), order, temperature=5.0)
    assert batches.count() == 15
    for batch in batches.epoch(1):
        drawn.update(dataset.languages[index] for index in batch["index"].tolist())
    assert drawn == draws_of({"large": 50, "small": 10}, 5.0)
    assert drawn["small"] > 20


def list_of(rows: list[Any]) -> Any:
    known = [json.dumps(row) for row in OfLanguages(60).rows]
    return {"index": torch.tensor([known.index(json.dumps(row["input_ids"])) for row in rows])}


def test_rows_say_what_counts_and_in_which_language_they_are() -> None:
    masked = [{"input_ids": [5] * 6, "labels": [-100] * 4 + [5, 5]} for _ in range(12)]
    assert MiniBatches(masked, COLLATE, BatchSize(4, 6)).count() == 4
    tensors = [{name: torch.tensor(ids) for name, ids in row.items()} for row in masked]
    assert MiniBatches(tensors, COLLATE, BatchSize(4, 6)).count() == 4
    unlabelled = [{"input_ids": [5] * 6} for _ in range(12)]
    assert MiniBatches(unlabelled, COLLATE, BatchSize(4, 12)).count() == 6
    with pytest.raises(DataError, match=r"training row is a str.*batch_tokens"):
        MiniBatches(["text"], COLLATE, BatchSize(4, 6)).count()
    with pytest.raises(DataError, match=r"sampling_temperature=5\.0 needs the language"):
        next(MiniBatches(Rows(), COLLATE, BatchSize(4), "random", temperature=5.0).epoch(0))


# ---------------------------------------------------------------------- streams


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 24), st.integers(1, 7), st.none() | st.integers(1, 60), st.sampled_from(STRATEGIES), st.booleans()
)
def test_a_stream_is_gone_on_with_at_every_mini_batch(
    count: int, batch_size: int, batch_tokens: int | None, order: str, is_ahead: bool
) -> None:
    """Also where reading is ahead of training, as it is with several processes."""
    batches = MiniBatches(StatefulStream(count), COLLATE, BatchSize(batch_size, batch_tokens), order)
    reader = batches.epoch(0)
    whole, places = [], [batches.place(0)]
    ahead = [next(reader, None)] if is_ahead else []
    while True:
        ahead.append(next(reader, None))
        batch = ahead.pop(0)
        if batch is None:
            break
        whole.append(batch)
        places.append(json.loads(json.dumps(batches.place(len(whole)))))
    assert sum(len(batch["labels"]) for batch in whole) == count
    for start, place in enumerate(places):
        other = MiniBatches(StatefulStream(count), COLLATE, BatchSize(batch_size, batch_tokens), order)
        assert same(list(other.epoch(0, start, place)), whole[start:])


def test_a_resumed_stream_reads_one_pool_again() -> None:
    batches = MiniBatches(StatefulStream(2000), COLLATE, BatchSize(4, 24), "group_by_length")
    reader = batches.epoch(0)
    for _ in range(321):
        next(reader)
    other = StatefulStream(2000)
    resumed = MiniBatches(other, COLLATE, BatchSize(4, 24), "group_by_length")
    assert same([next(resumed.epoch(0, 321, batches.place(321)))], [next(reader)])
    assert other.num_read < 50 * 24 / 3, "a pool is 50 mini-batches of 24 tokens, a row has at least 3"


def test_pools_of_a_stream_save_padding_and_meet_the_budget() -> None:
    padding = {}
    for order in STRATEGIES:
        batches = MiniBatches(StatefulStream(2000), COLLATE, BatchSize(4, 60), order)
        read = list(batches.epoch(0))
        padding[order] = sum(int((batch["labels"] == -100).sum()) for batch in read)
        sums = [num_targets(batch) for batch in read[:-1]]
        assert min(sums) >= 60 - 9
        assert max(sums) <= 60 + 9
    assert padding["group_by_length"] < padding["random"] / 5


def test_what_a_stream_cannot_do() -> None:
    with pytest.raises(UserError, match=r"sampling_temperature=5\.0: an iterable dataset draws its rows itself"):
        MiniBatches(Stream(), COLLATE, BatchSize(4), temperature=5.0).epoch(0)
    with pytest.raises(DataError, match="no load_state_dict"):
        MiniBatches(Stream(), COLLATE, BatchSize(4)).epoch(0, 1, {"state": {"number": 4}, "done": 0})
    # Another dataset's state was a KeyError, with a traceback and without a way on.
    with pytest.raises(DataError, match=r"does not fit this dataset: KeyError.*; resume with the same data"):
        MiniBatches(StatefulStream(), COLLATE, BatchSize(4)).epoch(0, 1, {"state": {"line": 4}, "done": 0})
    assert MiniBatches(Stream(), COLLATE, BatchSize(4, 9)).count() is None
    batches = MiniBatches(Stream(), COLLATE, BatchSize(4))
    next(batches.epoch(0))
    assert batches.place(1) is None


class SizedStream(Stream):
    """Has a length and, from torch, a method to get a row by its number that only raises."""

    def __len__(self) -> int:
        return len(self._rows)


def test_an_iterable_dataset_with_a_length_is_still_iterable() -> None:
    batches = MiniBatches(SizedStream(10), COLLATE, BatchSize(4))
    assert batches.is_iterable
    assert batches.count() == len(list(batches.epoch(0))) == 3


@pytest.mark.parametrize(("said", "gives"), [(8, "gives more rows"), (9, "gives more rows"), (12, "gives 10 rows")])
@pytest.mark.parametrize("start", [0, 1])
def test_a_length_that_is_not_the_number_of_rows_is_told(
    said: int, gives: str, start: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs are counted by it, as in transformers' Trainer; but they had wrong numbers without a word."""
    monkeypatch.setattr(loader.logger, "warning_once", loader.logger.warning)
    dataset = SizedStream(10)
    dataset.__class__ = type("Wrong", (SizedStream,), {"__len__": lambda self: said})
    assert len(list(MiniBatches(dataset, COLLATE, BatchSize(4)).epoch(0, start))) == 3 - start
    assert f"the length of the dataset, a Wrong, is {said}, and it {gives}:" in caplog.text


def test_what_a_collator_may_not_return() -> None:
    """The errors named no next step."""
    with pytest.raises(DataError, match=r"'text' is a list; .*: let the data collator make a tensor of it"):
        tensors_of({"text": ["a"]})
    with pytest.raises(DataError, match=r"returned a list; .* such as \{'input_ids': .*: let it return that"):
        next(MiniBatches(Rows(4), list, BatchSize(2)).epoch(0))


def test_a_data_set_that_was_gone_on_with_begins_anew_when_it_is_asked_to() -> None:
    rows = [dict(row) for row in Rows(20)]
    data = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
    whole = list(MiniBatches(data, COLLATE, BatchSize(4)).epoch(0))
    read = MiniBatches(data, COLLATE, BatchSize(4))
    reader = read.epoch(0)
    next(reader), next(reader)
    assert same(list(MiniBatches(data, COLLATE, BatchSize(4)).epoch(0, 2, read.place(2))), whole[2:])
    assert same(list(MiniBatches(data, COLLATE, BatchSize(4)).epoch(0)), whole)


# ---------------------------------------------------------------------- the trainer


DATA: dict[str, Any] = {
    "by temperature and tokens": lambda: (
        OfLanguages(40),
        {"sampling_temperature": 5.0, "batch_tokens": 60, "max_steps": -1, "num_train_epochs": 2.0},
    ),
    "a stream by tokens": lambda: (StatefulStream(50, endless=True), {"batch_tokens": 24, "max_steps": 5}),
    "a stream that ends": lambda: (StatefulStream(15), {"max_steps": 5}),
    "a stream without a state": lambda: (Stream(20), {"batch_tokens": 40, "max_steps": 5}),
}


def train(
    kind: str, folder: Path, resume: str | bool | None = None, **more: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of every step, and the weights."""
    dataset, values = DATA[kind]()
    recorder = Recorder()
    made = trainer(
        folder,
        train_dataset=dataset,
        callbacks=[recorder],
        train_sampling_strategy="group_by_length",
        **values | more,
    )
    made.train(resume_from_checkpoint=resume)
    return recorder.losses, weights(made)


@pytest.mark.parametrize(("kind", "accumulation"), [*((kind, 1) for kind in DATA), ("a stream by tokens", 2)])
def test_a_resumed_training_trains_on_the_same_mini_batches(kind: str, accumulation: int, tmp_path: Path) -> None:
    common = {"gradient_accumulation_steps": accumulation}
    losses, parameters = train(kind, tmp_path, save_strategy="steps", save_steps=3, **common)
    found, others = train(kind, tmp_path / "resumed", str(tmp_path / "checkpoint-3"), **common)
    assert found == losses[3:] != []
    assert all(torch.equal(others[name], parameters[name]) for name in parameters)


@pytest.mark.parametrize("kind", ["by temperature and tokens", "a stream by tokens", "a stream that ends"])
def test_a_training_that_max_steps_stopped_inside_an_epoch_goes_on_inside_it(kind: str, tmp_path: Path) -> None:
    """What was saved at the end of the epoch said once that the next one begins there: its other rows were left out."""
    common = {"lr_scheduler_type": "constant"}
    losses, _ = train(kind, tmp_path / "whole", max_steps=4, **common)
    train(kind, tmp_path / "part", max_steps=2, save_strategy="epoch", **common)
    assert train(kind, tmp_path / "part", True, max_steps=4, **common)[0] == losses[2:]


def test_another_sampling_is_not_resumed(tmp_path: Path) -> None:
    def made(**values: Any) -> Any:
        given = {"sampling_temperature": 5.0, "batch_tokens": 24} | values
        return trainer(tmp_path, train_dataset=OfLanguages(40), save_strategy="steps", save_steps=1, **given)

    made(max_steps=1).train()
    for name, value in (("batch_tokens", 25), ("sampling_temperature", 2.0)):
        with pytest.raises(CheckpointError, match=f"was written with {name}="):
            made(max_steps=2, **{name: value}).train(resume_from_checkpoint=True)
    state = tmp_path / "checkpoint-1" / "training_state" / "state.json"
    content = json.loads(state.read_text())
    for name in ("batch_tokens", "sampling_temperature"):
        del content["progress"]["data"][name]
    # As an older version wrote it, which knew neither these arguments nor digests.
    del content["progress"]["has_digests"]
    state.write_text(json.dumps(content))
    (tmp_path / "checkpoint-1" / DIGESTS_FILE).unlink()
    with pytest.raises(CheckpointError, match="was written with batch_tokens=None and this run has 24"):
        made(max_steps=2).train(resume_from_checkpoint=True)


def test_samples_a_second_count_the_rows_there_were(tmp_path: Path) -> None:
    output = trainer(tmp_path, train_dataset=CausalRows(40), family="llama", batch_tokens=30, max_steps=-1).train()
    assert output.metrics["train_samples_per_second"] == pytest.approx(
        3 * 40 / output.metrics["train_runtime"], rel=0.05
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_tokens": 0}, "batch_tokens=0: expected a whole number of at least 1"),
        ({"batch_tokens": 9, "dataloader_drop_last": True}, "dataloader_drop_last=True with batch_tokens"),
        ({"sampling_temperature": 0.5}, "sampling_temperature=0.5: expected a number of at least 1"),
        ({"sampling_temperature": 2, "train_sampling_strategy": "sequential"}, "sequential.*keeps their order"),
    ],
)
def test_what_the_arguments_refuse(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        trainer(tmp_path, **values)


@pytest.mark.parametrize("order", STRATEGIES)
def test_streams_of_the_library_are_gone_on_with_in_any_epoch(order: str) -> None:
    datasets = pytest.importorskip("datasets")

    def batches() -> MiniBatches:
        rows = Rows(30)
        dataset = datasets.Dataset.from_list([rows[index] for index in range(30)]).to_iterable_dataset(num_shards=5)
        return MiniBatches(dataset, COLLATE, BatchSize(4, 40), order)

    first = batches()
    for epoch in range(2):
        whole, places = [], [first.place(0)]
        for batch in first.epoch(epoch):
            whole.append(batch)
            places.append(json.loads(json.dumps(first.place(len(whole)))))
        for start in (1, 3, len(whole)):
            other = batches()
            assert same(list(other.epoch(epoch, start, places[start])), whole[start:])
            assert len(list(other.epoch(epoch + 1))) >= 4, "the next epoch begins at its beginning"
