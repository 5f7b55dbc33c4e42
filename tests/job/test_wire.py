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

from hf_gpipe.errors import MessageError, PartitionError, ScheduleError, UserError
from hf_gpipe.job import wire
from hf_gpipe.job.world import World
from hf_gpipe.planner.costs.model_costs import Seconds, SharedParameter
from hf_gpipe.planner.parameters import Parameters
from hf_gpipe.recipe.section import MisfitError
from hf_gpipe.runtime import batches
from hf_gpipe.runtime.timing import ActionTime
from hf_gpipe.schedule import Schedule
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import FORWARD, REDUCE, UPDATE
from tests.gloo import run_gloo

TABLE = Schedule.from_text(
    "table: 9\nschedule: gpipe\nnum_stages: 2\nnum_micro_batches: 1\nplacement: 0 1\nprocess 0: 0F0 0B0 0U\n"
    "process 1: 1F0 1B0 1U\n"
)
VALUES = [
    *(None, True, 0, -(10**30), 0.1, math.inf, "text \u20ac \0", [], (), {}, set(), [1, (2.5, None)]),
    {1: "a", (0, 1): [True], "b": {"c": {3, 4}}, None: frozenset({"x"})},
    *(Path("a/b"), torch.bfloat16, TABLE, Action(FORWARD, 1, 2), UPDATE),
    SharedParameter("w", Parameters(1, 2, 3, 4), 5),
    Seconds(1.0, 2.0, 3.0),
    [ActionTime(Action(REDUCE, 0), 1.0, 2.0)],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value)[:30])
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    found = wire.unpack(wire.pack(value))
    assert found == value
    assert type(found) is type(value)


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


@pytest.mark.parametrize("value", [_Runs(), lambda: 0, {"a": [object()]}, np.array(["text"]), ValueError("x"), print])
def test_what_cannot_travel_is_an_error(value: Any) -> None:
    with pytest.raises(UserError, match="cannot be sent"):
        wire.pack(value)
    assert not wire.is_sendable(value)


def test_errors_travel_as_data() -> None:
    errors = [UserError("a"), PartitionError("b", fullness=1.5), PartitionError("c"), ScheduleError("d", line="steps")]
    for error in errors:
        found = wire.unpack(wire.pack(error))
        assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
    assert type(wire.unpack(wire.pack(MisfitError(("a", 1), ": wrong")))) is UserError  # the nearest that travels


def _message(text: object, **tensors: torch.Tensor) -> torch.Tensor:
    raw = text if isinstance(text, bytes) else json.dumps(text).encode()
    tensors["value"] = torch.tensor(list(raw), dtype=torch.uint8)
    return torch.frombuffer(bytearray(safetensors.torch.save(tensors)), dtype=torch.uint8)


_ACTION = ["enum", "ActionKind", "F"]
MALFORMED = {
    "a pickle": torch.frombuffer(bytearray(pickle.dumps(_Runs())), dtype=torch.uint8),
    "nothing": torch.empty(0, dtype=torch.uint8),
    "no text": torch.frombuffer(bytearray(safetensors.torch.save({"0": torch.ones(2)})), dtype=torch.uint8),
    "text of numbers": torch.frombuffer(bytearray(safetensors.torch.save({"value": torch.ones(2)})), dtype=torch.uint8),
    "no JSON": _message(b"{'a': 1}"),
    "no UTF-8": _message(b'"\xff\xfe"'),
    "deep": _message(b"[" * 100_000 + b"]" * 100_000),
    "levels": _message(json.loads('["list", [' * 60 + "1" + "]]" * 60)),
    "an object of JSON": _message({"a": 1}),
    "an unknown word": _message(["eval", "1"]),
    "an attribute of torch": _message(["dtype", "load"]),
    "an unknown class": _message(["object", "Popen", [["list", ["true"]]]]),
    "an error that does not travel": _message(["error", "SystemExit", "0", {}]),
    "attributes of an error": _message(["error", "UserError", "a", {"__class__": "b"}]),
    "a wrong attribute": _message(["error", "PartitionError", "a", {"fullness": "much"}]),
    "a missing tensor": _message(["tensor", "1"]),
    "the text as a tensor": _message(["tensor", "value"]),
    "an unhashable key": _message(["dict", [[["list", []], 1]]]),
    "a pair of three": _message(["dict", [["a", 1, 2]]]),
    "a list that is text": _message(["list", "abc"]),
    "too few values": _message(["object", "Action", [_ACTION]]),
    "a value of another type": _message(["object", "Action", [_ACTION, "1", 2, 0]]),
    "a boolean for a number": _message(["object", "Action", [_ACTION, True, 2, 0]]),
    "values that the class refuses": _message(["object", "Action", [_ACTION, 1, None, 0]]),
    "no such member": _message(["enum", "ActionKind", "Z"]),
    "an enumeration of fields": _message(["object", "ActionKind", []]),
    "a class that is no enumeration": _message(["enum", "Action", "F"]),
    "a section that is not valid": _message(["object", "DecidedConfig", [None] * 19]),
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
    whole = bytes(wire.pack({"tensors": [torch.ones(3)], "table": TABLE, "error": UserError("a")}).numpy())
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
    world = World.of_job()
    rank, group = world.rank, world.group_on(torch.device("cpu"))
    found: dict[str, Any] = {
        "gathered": world.gather_objects({"rank": rank, "more": "x" * 9000 * rank}),
        "from 1": world.broadcast_value(Path(f"of-{rank}"), 1),
        "at first": world.gather_at_first([np.arange(rank)], [1, 0]),
    }
    for name, act in {
        "unsendable": lambda: world.gather_objects(_Runs() if rank == 1 else 0),
        "unsendable from 1": lambda: world.broadcast_value(_Runs(), 1),
        "unsendable at first": lambda: world.gather_at_first(_Runs(), [0, 1]),
        "of the reader": lambda: world.from_reader(lambda: _fail()),
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
    raise PartitionError("of the reader")


def test_messages_between_processes() -> None:
    first, second = run_gloo(_exchange, 2)
    for found in (first, second):
        assert found["gathered"] == [{"rank": 0, "more": ""}, {"rank": 1, "more": "x" * 9000}]
        assert found["from 1"] == Path("of-1")
        assert "test_wire._Runs cannot be sent" in found["unsendable"]
        assert "test_wire._Runs cannot be sent" in found["unsendable from 1"]
        assert "test_wire._Runs cannot be sent" in found["unsendable at first"]
        assert found["of the reader"] == "of the reader"
    assert first["at first"] is None
    assert [one.tolist() for (one,) in second["at first"]] == [[0], []]
    assert "is not one of hf_gpipe's" in first["garbage"]
    assert f"it would have {1 << 62} bytes" in first["size"]
    assert "it would have -1 bytes" in first["negative"]
