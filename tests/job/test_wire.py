"""Values travel between processes as JSON and tensors; a malformed message is one error, and nothing of it runs."""

from __future__ import annotations

import json
import math
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from hf_gpipe.errors import MessageError, PartitionError, ScheduleError, UserError, error_of_data, error_to_data
from hf_gpipe.job import wire
from hf_gpipe.job.world import World
from hf_gpipe.planner.costs.model_costs import Seconds, SharedParameter, SumsOverRanks
from hf_gpipe.planner.parameters import Parameters
from hf_gpipe.runtime import batches
from hf_gpipe.settings.pipeline import DecidedConfig, PipelineConfig
from hf_gpipe.settings.section import MisfitError
from tests.gloo import run_gloo

VALUES = [
    *(None, True, 0, -(10**30), 0.1, math.inf, "text \u20ac \0", [], (), {}, [1, (2.5, None)]),
    {"a": {"b": [(), {"c": False}]}, "": "tuple()"},
    {1: "a", (0, 1): [True], None: {"tuple()": 1}},
]
KINDS = [
    (SharedParameter("w", Parameters(1, 2, 3, 4), 5), SharedParameter),
    (Seconds(1.0, math.inf, 3.0), Seconds | None),
    (None, Seconds | None),
    ({1: (True, "a")}, dict[int, tuple[bool, str]]),
    (PipelineConfig(2, 4, "gpipe", recompute="stage").decided(partition=(1, 1)), DecidedConfig),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value)[:30])
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    found = wire.unpack(wire.pack(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(("value", "kind"), KINDS)
def test_a_value_of_a_type_comes_back_as_it_was(value: Any, kind: Any) -> None:
    found = wire.from_plain(wire.unpack(wire.pack(wire.to_plain(value, kind))), kind)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("plain", "kind"),
    [
        ({"forward_only": "1", "forward": 1.0, "backward": 1.0}, Seconds),
        ({"forward_only": 1.0, "forward": 1.0}, Seconds),
        ([1, 2.5], tuple[int, int]),
        ({"1": True}, dict[int, int]),
        ("Popen", DecidedConfig),
    ],
)
def test_a_value_of_another_type_is_one_error(plain: Any, kind: Any) -> None:
    with pytest.raises(MessageError, match="is not one of hf_gpipe's"):
        wire.from_plain(plain, kind)


def test_tensors_and_arrays_come_back_as_they_were() -> None:
    shared = torch.arange(6.0)
    tensors = [
        *(shared, shared[:3], shared.view(2, 3).T, torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 3)),
        *(torch.tensor([True, False]), torch.tensor(2**60), torch.ones(2, dtype=torch.float8_e4m3fn)),
    ]
    for tensor, found in zip(tensors, wire.unpack(wire.pack(tensors)), strict=True):
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert torch.equal(found.double(), tensor.double())
    arrays = [np.arange(6).reshape(2, 3)[:, ::-1], np.array(2.5, dtype=np.float32), np.zeros((0, 2), dtype=bool)]
    for array, found in zip(arrays, wire.unpack(wire.pack(arrays)), strict=True):
        assert isinstance(found, np.ndarray)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert np.array_equal(found, array)
    assert wire.unpack(wire.pack({"loss": np.float32(0.5), "n": np.int64(3)})) == {"loss": 0.5, "n": 3}


class _Runs:
    """Runs code where it is unpickled, and where it is called."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize(
    "value",
    [
        *(_Runs(), lambda: 0, {"a": [object()]}, np.array(["text"]), ValueError("x"), print),
        *({1}, Path("a"), torch.float32, SumsOverRanks()),
    ],
)
def test_what_cannot_travel_is_an_error(value: Any) -> None:
    with pytest.raises(UserError, match="cannot be sent"):
        wire.pack(value)
    assert not wire.is_sendable(value)


def test_errors_travel_as_data() -> None:
    errors = [UserError("a"), PartitionError("b", fullness=1.5), PartitionError("c"), ScheduleError("d", line="steps")]
    for error in errors:
        found = error_of_data(*wire.unpack(wire.pack(error_to_data(error))))
        assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
    assert (
        type(error_of_data(*error_to_data(MisfitError(("a", 1), ": wrong")))) is UserError
    )  # the nearest that travels
    for data in (("SystemExit", "0", {}), ("UserError", "a", {"b": 1}), ("PartitionError", "a", {"fullness": "much"})):
        with pytest.raises(MessageError):
            error_of_data(*data)


def _message(text: object, **tensors: torch.Tensor) -> torch.Tensor:
    raw = text if isinstance(text, bytes) else json.dumps(text).encode()
    tensors["value"] = torch.tensor(list(raw), dtype=torch.uint8)
    return torch.frombuffer(bytearray(safetensors.torch.save(tensors)), dtype=torch.uint8)


MALFORMED = {
    "a pickle": torch.frombuffer(bytearray(pickle.dumps(_Runs())), dtype=torch.uint8),
    "nothing": torch.empty(0, dtype=torch.uint8),
    "no text": torch.frombuffer(bytearray(safetensors.torch.save({"0": torch.ones(2)})), dtype=torch.uint8),
    "text of numbers": torch.frombuffer(bytearray(safetensors.torch.save({"value": torch.ones(2)})), dtype=torch.uint8),
    "no JSON": _message(b"{'a': 1}"),
    "no UTF-8": _message(b'"\xff\xfe"'),
    "deep": _message(b"[" * 100_000 + b"]" * 100_000),
    "a missing tensor": _message({"tensor()": "1"}),
    "a missing array": _message([{"array()": "1"}]),
    "the text as a tensor": _message({"tensor()": "value"}),
    "a tensor of an unhashable name": _message({"tensor()": [1]}),
    "a tuple that is text": _message({"tuple()": "abc"}),
    "an unhashable key": _message({"dict()": [[[], 1]]}),
    "a pair of three": _message({"dict()": [["a", 1, 2]]}),
    "a long number": _message(b"1" * 5000),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_message_is_one_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MessageError, match="is not one of hf_gpipe's"):
        wire.unpack(MALFORMED[name])
    assert not Path("executed").exists()


def test_mutated_messages_become_values_or_that_error() -> None:
    dice = random.Random(0)
    whole = bytes(wire.pack({"tensors": [torch.ones(3)], "pair": (1, {"key": None}), "text": "a" * 40}).numpy())
    num_refused = 0
    for _ in range(1000):
        data = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        data = data[: dice.choice([len(data), dice.randrange(len(data)) + 1])]
        try:
            wire.unpack(torch.frombuffer(data, dtype=torch.uint8))
        except MessageError:
            num_refused += 1
    assert num_refused > 500


@pytest.mark.parametrize("data", [b"", b"junk" * 9, safetensors.torch.save({"input_ids": torch.ones(2)})])
def test_a_malformed_mini_batch_is_one_error(data: bytes) -> None:
    with pytest.raises(MessageError):
        batches.unpack(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte())


def _exchange() -> dict[str, Any]:
    world = World.current()
    rank, group = world.rank, world.group_on(torch.device("cpu"))
    found: dict[str, Any] = {
        "gathered": world.gather_objects({"rank": rank, "more": "x" * 9000 * rank}),
        "from 1": world.broadcast_value((f"of-{rank}",), 1),
        "at first": world.gather_at_first([np.arange(rank)], [1, 0]),
    }
    for name, act in {
        "unsendable": lambda: world.gather_objects(_Runs() if rank == 1 else 0),
        "unsendable from 1": lambda: world.broadcast_value(_Runs(), 1),
        "unsendable at first": lambda: world.gather_at_first(_Runs(), [0, 1]),
        "of the main process": lambda: world.from_main(lambda: _fail()),
    }.items():
        with pytest.raises(UserError) as caught:
            act()
        found[name] = str(caught.value)
    # A peer that sends something else in place of a value, and one that announces more than there can be.
    for name, size in {"garbage": 64, "size": 1 << 62, "negative": -1}.items():
        if rank == 0:
            with pytest.raises(MessageError) as refused:
                wire.receive(1, group)
            found[name] = str(refused.value)
        else:
            dist.send(torch.tensor([size]), group_dst=0, group=group)
            if name == "garbage":
                dist.send(torch.ones(size, dtype=torch.uint8), group_dst=0, group=group)
    world.barrier()
    return found


def _fail() -> None:
    raise PartitionError("of the main process")


def test_messages_between_processes() -> None:
    first, second = run_gloo(_exchange, 2)
    for found in (first, second):
        assert found["gathered"] == [{"rank": 0, "more": ""}, {"rank": 1, "more": "x" * 9000}]
        assert found["from 1"] == ("of-1",)
        assert "test_wire._Runs cannot be sent" in found["unsendable"]
        assert "test_wire._Runs cannot be sent" in found["unsendable from 1"]
        assert "test_wire._Runs cannot be sent" in found["unsendable at first"]
        assert found["of the main process"] == "of the main process"
    assert first["at first"] is None
    assert [one.tolist() for (one,) in second["at first"]] == [[0], []]
    assert "is not one of hf_gpipe's" in first["garbage"]
    assert f"it would have {1 << 62} bytes" in first["size"]
    assert "it would have -1 bytes" in first["negative"]
