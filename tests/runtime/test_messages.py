"""The executor's messages: when receives are started, what is kept until when, and what a failed step leaves."""

from __future__ import annotations

import queue
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_gpipe.errors import HfGpipeError, StageError, UserError
from hf_gpipe.job.facts import DeviceFacts, RankFacts
from hf_gpipe.job.world import World
from hf_gpipe.runtime import edges as edges_module
from hf_gpipe.runtime.channel import Channel, LocalChannel, RemoteChannel
from hf_gpipe.runtime.device_choice import world_for
from hf_gpipe.runtime.edges import Edge, connect
from hf_gpipe.runtime.executor import Executor
from hf_gpipe.runtime.mesh import Mesh
from hf_gpipe.runtime.micro_batch import MicroBatch
from hf_gpipe.schedule import Placement, Schedule, build, placement_for
from hf_gpipe.schedule.messages import num_communicators
from hf_gpipe.settings.pipeline import PipelineConfig
from tests.gloo import run_gloo

CPU = torch.device("cpu")
SECONDS = 5.0


class Stage:
    """Adds the number of the stage to what it receives; its backward does the same."""

    device = CPU

    head = None

    def __init__(self, number: int, num_stages: int, fails: bool = False) -> None:
        self.number, self.is_first, self.is_last = number, number == 0, number == num_stages - 1
        self.trainable_outputs = {} if self.is_last else {"hidden": True}
        self.trainable_inputs = {} if self.is_first else {"hidden": True}
        self.fails = fails

    def shapes(self, micro_batch: MicroBatch) -> dict[str, tuple[int, ...]]:
        return {"hidden": (1,)}

    input_shapes = output_shapes = input_gradient_shapes = output_gradient_shapes = shapes

    def forward(self, context: Any, **options: bool) -> dict[str, torch.Tensor]:
        if self.fails:
            raise RuntimeError("out of luck")
        index = torch.tensor([float(context.micro_batch.index)])
        total = context.carry.get("hidden", index) + self.number
        return {"loss": total.sum()} if self.is_last else {"hidden": total}

    def evaluate(self, context: Any) -> dict[str, torch.Tensor]:
        return self.forward(context, keep_graph=False)

    def recompute(self, index: int) -> None:
        pass

    def backward(self, index: int, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.is_first:
            return {}
        return {"hidden": gradients.get("hidden", torch.tensor([float(index)])) + self.number}

    def end_step(self, *of_step: object) -> None:
        pass

    def reset(self) -> None:
        pass


class Line(queue.Queue[Any]):
    """One direction between two processes, with the messages that were received and those that the sender has freed."""

    def __init__(self) -> None:
        super().__init__()
        self.received: set[Any] = set()
        self.freed: set[Any] = set()


class BlockingChannel(Channel):
    """A send and a receive last until the other one has begun; messages of one direction have no other names."""

    def __init__(self, messages: Line, boundary: int) -> None:
        self._messages, self._boundary = messages, boundary
        self._received: dict[int, Any] = {}

    def _send(self, micro_batch: int, tensors: Any, names: Any) -> None:
        taken = threading.Event()
        self._messages.put(((micro_batch, dict(tensors)), taken))
        assert taken.wait(SECONDS), "a send that nobody receives"

    def expect(self, micro_batch: int, shapes: Any) -> None:
        (number, tensors), taken = self._messages.get(timeout=SECONDS)
        taken.set()
        assert number == micro_batch, "the messages of two processes are not sent and received in one order"
        self._received[micro_batch] = tensors

    def _receive(self, micro_batch: int) -> dict[str, torch.Tensor]:
        self._messages.received.add((self._boundary, micro_batch))
        return self._received.pop(micro_batch)

    def arrived(self, micro_batch: int) -> None:
        assert (self._boundary, micro_batch) in self._messages.received, "a message is freed that has not arrived"
        self._messages.freed.add((self._boundary, micro_batch))

    def flush(self) -> None:
        pass

    def reset(self) -> None:
        pass

    def check(self) -> None:
        pass


def micro_batches(count: int) -> list[MicroBatch]:
    return [MicroBatch(index, {}, 0, 1, count) for index in range(count)]


def run_processes(table: Schedule) -> tuple[list[float], list[Line]]:
    """Run a table with one thread per process and one blocking line per pair of processes and direction; the losses,
    and the lines."""
    num_stages, home = table.num_stages, [own[0] for own in table.placement.workers]
    ranks = range(table.placement.num_processes)
    lines = {(a, b): Line() for a in ranks for b in ranks}
    outcomes: dict[int, Any] = {}

    def work(rank: int) -> None:
        own: dict[tuple[int, int, int], Edge] = {}
        for s in range(num_stages - 1):
            one, other = home[s], home[s + 1]
            if one == other:
                own[s, one, other] = Edge(LocalChannel(CPU), LocalChannel(CPU))
            else:
                down, up = lines[one, other], lines[other, one]
                own[s, one, other] = Edge(BlockingChannel(down, s), BlockingChannel(up, s))
        stages: Any = {s: Stage(s, num_stages) for s in table.placement.stages_of(rank)}
        try:
            outputs = Executor({rank: stages}, own).run(table, micro_batches(table.num_micro_batches)).outputs
            outcomes[rank] = {index: float(one["loss"]) for index, one in outputs.items()}
        except StageError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outcome in outcomes.values():
        assert isinstance(outcome, dict), outcome
    losses = outcomes[home[-1]]
    return [losses[index] for index in range(table.num_micro_batches)], [*lines.values()]


@pytest.mark.parametrize(
    ("name", "num_stages", "num_processes"),
    [
        ("naive", 4, 4),
        ("gpipe", 4, 4),
        ("gpipe_fused", 4, 4),
        ("1f1b", 4, 4),
        ("1f1b", 6, 3),
        ("interleaved_1f1b", 8, 4),
        ("interleaved_1f1b", 4, 2),
        ("forward_only", 6, 3),
    ],
)
def test_no_table_stops_where_every_message_blocks(name: str, num_stages: int, num_processes: int) -> None:
    table = build(name, num_stages, 8, placement_for(name, num_stages, num_processes))
    losses, lines = run_processes(table)
    assert losses == [index + sum(range(num_stages)) for index in range(8)]
    received, freed = sum(len(line.received) for line in lines), sum(len(line.freed) for line in lines)
    if name == "1f1b" and num_stages == num_processes:
        # Of the gradients those stay until the end of which no later forward tells that they have come.
        assert received - freed == sum(num_stages - stage for stage in range(num_stages - 1))
    assert bool(freed) == (name != "forward_only")


# ---------------------------------------------------------------------- communicators


class Stub(Mesh):
    """A process that notes the communicators it creates."""

    def new_group(self, ranks: Any, device: torch.device) -> Any:
        log.append(("new", tuple(ranks)))
        return SimpleNamespace()


log: list[Any] = []


@pytest.mark.parametrize(
    ("placement", "count"),
    [
        (Placement.one_stage_each(4), [2, 4, 4, 2]),
        (Placement.interleaved(8, 4), [4, 4, 4, 4]),
        (Placement.interleaved(8, 2), [2, 2]),
        (Placement((0, 1, 0, 1), ("cuda:0", "cuda:2", "cuda:1", "cuda:2")), [4, 4]),
    ],
)
def test_communicators_are_shared_and_set_up_one_after_another(
    placement: Placement, count: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(edges_module.torch, "zeros", lambda *size, device, **options: zeros(*size, **options))
    monkeypatch.setattr(edges_module.torch.cuda, "synchronize", lambda device: log.append("ready"))
    monkeypatch.setattr(dist, "send", lambda token, peer, group: log.append("first message"))
    monkeypatch.setattr(dist, "recv", lambda token, peer, group: log.append("first message"))
    created = []
    for rank in range(placement.num_processes):
        log.clear()
        names = placement.devices or ("cuda:0",) * placement.num_stages
        own = dict.fromkeys(names[stage] for stage in placement.stages_of(rank))
        facts = replace(RankFacts.current(), devices=tuple(DeviceFacts(name, 1, 1) for name in own))
        world = Stub(rank, (facts,) * placement.num_processes, placement=placement)
        found = connect(world, lambda stage, name: torch.float32)
        assert {stage for stage, _, _ in found} == {
            s for s in range(placement.num_stages - 1) if {s, s + 1} & set(world.local_stages)
        }
        for place, entry in enumerate(log):
            if entry == "first message":
                assert log[place + 1] == "ready"
        created.append([entry for entry in log if isinstance(entry, tuple)])
        assert log.count("first message") == num_communicators(placement, rank) == count[rank]
        groups = {id(c._group): c for edge in found.values() for c in (edge.down, edge.up)}  # type: ignore[attr-defined]
        assert len(groups) == count[rank]
    assert all(own == created[0] for own in created)


def on_two_kinds() -> str:
    with pytest.raises(UserError) as caught:
        world_for(PipelineConfig(2), "cpu" if World.current().rank == 0 else "meta")
    return str(caught.value)


def test_devices_of_several_kinds_in_several_processes_are_refused() -> None:
    for message in run_gloo(on_two_kinds, 2):
        assert message.startswith(
            "process 0 on cpu and process 1 on meta: the processes of a pipeline exchange tensors "
        )


# ---------------------------------------------------------------------- what is kept, and what a failed step leaves


def remote() -> RemoteChannel:
    group: Any = None
    return RemoteChannel(1, 0, group, CPU, lambda name: torch.float32)


def test_a_tensor_is_kept_until_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    def isend(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        alive = weakref.ref(tensor)
        return SimpleNamespace(is_completed=lambda: False, wait=lambda: waited.append(alive() is not None))

    monkeypatch.setattr(dist, "isend", isend)
    channel = remote()
    for index in range(2):
        channel.send(index, {"hidden": torch.zeros(3)}, {"hidden": (3,)})
    channel.arrived(0)
    channel.arrived(7)  # of which nothing was sent
    assert waited == [True]
    channel.flush()
    assert waited == [True, True]


SMALL = {f"router{number}": (3, number + 1) for number in range(5)}
SHAPES = {"router0": (3, 1), "hidden": (2, 4, 3), **SMALL, "count": (), "none": (2, 0), "half": (2,)}


def _joined_messages() -> tuple[int, dict[str, torch.Tensor]]:
    """How many messages one of many tensors is, and what arrives of it."""
    world = World.current()
    dtype_of = {"count": torch.int64, "half": torch.bfloat16}
    channel = RemoteChannel(1 - world.rank, 3, world.group_on(CPU), CPU, lambda name: dtype_of.get(name, torch.float32))
    begun: list[Any] = []
    for name in ("isend", "irecv"):
        call = getattr(dist, name)
        setattr(dist, name, lambda *args, call=call, **options: (begun.append(args), call(*args, **options))[1])
    if world.rank == 0:
        ones = {name: torch.ones(shape, dtype=dtype_of.get(name)) for name, shape in SHAPES.items()}
        made = {name: one * number for number, (name, one) in enumerate(ones.items())}
        channel.send(0, made, SHAPES)
        channel.flush()
        return len(begun), made
    channel.expect(0, SHAPES)
    received = channel.receive(0)
    version = received["router1"]._version
    received["router2"].add_(0)
    assert received["router1"]._version == version, "tensors of one message change together"
    return len(begun), received


def test_many_small_tensors_of_a_message_travel_together() -> None:
    """A mixture of experts sent the router logits of each layer as a message of its own, up to 32 for one action."""
    (num_sent, sent), (num_received, received) = run_gloo(_joined_messages, 2)
    # The largest, the others of its type, and two of other types.
    assert num_sent == num_received == 4
    assert sent.keys() == received.keys()
    for name, tensor in sent.items():
        assert torch.equal(tensor, received[name])
        assert tensor.dtype == received[name].dtype


def test_after_a_failed_step_a_pipeline_of_several_processes_does_not_go_on() -> None:
    table = build("gpipe", 2, 2)
    stages: Any = {0: Stage(0, 2, fails=True)}
    executor = Executor({0: stages}, {(0, 0, 1): Edge(remote(), remote())})
    with pytest.raises(StageError, match="stage 0, action 0F0: RuntimeError: out of luck"):
        executor.run(table, micro_batches(2))
    stages[0].fails = False
    with pytest.raises(HfGpipeError, match=r"^a step failed in this process, and its messages .* start all processes"):
        executor.run(table, micro_batches(2))


def test_after_a_failed_step_a_pipeline_of_one_process_goes_on() -> None:
    table = build("gpipe", 2, 2, Placement.spread(2, 1))
    stages: Any = {0: Stage(0, 2), 1: Stage(1, 2, fails=True)}
    executor = Executor({0: stages}, {(0, 0, 0): Edge(LocalChannel(CPU), LocalChannel(CPU))})
    with pytest.raises(StageError, match="stage 1, action 1F0: RuntimeError: out of luck"):
        executor.run(table, micro_batches(2))
    stages[1].fails = False
    assert float(executor.run(table, micro_batches(2)).loss or 0) == 3.0
