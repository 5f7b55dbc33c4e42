"""Messages between two processes on emulated devices: what they carry, and what they do not wait for."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hf_gpipe import Pipeline
from hf_gpipe.runtime.edges import Edge, connect
from tests.emulated_cuda.models import config_of
from tests.emulated_cuda.processes import on_emulated_cuda


def edge_of_two() -> tuple[Edge, torch.device]:
    """New communicators between stage 0, in process 0, and stage 1, in process 1; and this process's device."""
    world = Pipeline(config_of("llama"), 2, device="cuda").world
    return connect(world, lambda stage, name: torch.float32)[0, 0, 1], world.device


@on_emulated_cuda(2)
def test_a_process_computes_on_a_device_of_its_own() -> None:
    _, device = edge_of_two()
    assert device.index == torch.cuda.current_device() == dist.get_rank()
    assert torch.ones(1, device="cuda").device == device


@on_emulated_cuda(2)
def test_tensors_with_any_strides_arrive() -> None:
    edge, device = edge_of_two()
    values = torch.arange(24.0, device=device)
    sent = [
        values.view(4, 6).t(),
        values.view(4, 6)[:, 1:3],
        values.view(2, 3, 4).permute(2, 0, 1),
        values[:1].expand(5),
    ]
    for micro_batch, tensor in enumerate(sent):
        shapes = {"hidden": tuple(tensor.shape)}
        for channel, sender in ((edge.down, 0), (edge.up, 1)):
            if dist.get_rank() == sender:
                channel.send(micro_batch, {"hidden": tensor}, shapes)
                channel.flush()
            else:
                channel.expect(micro_batch, shapes)
                assert torch.equal(channel.receive(micro_batch)["hidden"].cpu(), tensor.cpu())


@on_emulated_cuda(2)
def test_a_message_does_not_wait_for_one_in_the_other_direction() -> None:
    """Process 0 expects an answer before it asks, and process 1 answers when it has read the question."""
    edge, device = edge_of_two()
    shapes = {"hidden": (3,)}
    for micro_batch in range(3):
        if dist.get_rank() == 0:
            edge.up.expect(micro_batch, shapes)
            edge.down.send(micro_batch, {"hidden": torch.full((3,), micro_batch + 1.0, device=device)}, shapes)
            assert edge.up.receive(micro_batch)["hidden"].tolist() == [2 * micro_batch + 2.0] * 3
        else:
            edge.down.expect(micro_batch, shapes)
            asked = edge.down.receive(micro_batch)["hidden"]
            assert asked.tolist() == [micro_batch + 1.0] * 3
            edge.up.send(micro_batch, {"hidden": 2 * asked}, shapes)
    edge.down.flush()
    edge.up.flush()
