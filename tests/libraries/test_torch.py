"""The private names of torch do what `hf_gpipe/libraries/torch.py` says of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hf_gpipe.libraries import torch as own

ATEN: Any = torch.ops.aten


def test_products_of_groups() -> None:
    """Rows of group e are multiplied by matrix e; the operation below autograd has the other name."""
    rows, matrices, ends = torch.randn(16, 16), torch.randn(2, 16, 16), torch.tensor([8, 16], dtype=torch.int32)
    expected = torch.cat([rows[:8] @ matrices[0], rows[8:] @ matrices[1]])
    seen: list[Any] = []

    class Seeing(own.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    with Seeing():
        found = own.grouped_mm(rows, matrices, offs=ends)
    torch.testing.assert_close(found, expected)
    assert own.ATEN_GROUPED_MM in seen


def test_operations_that_plans_name() -> None:
    seen: set[Any] = set()

    class Seeing(own.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    given = torch.randn(1, 2, 4, 8, requires_grad=True)
    with Seeing():
        F.scaled_dot_product_attention(given, given, given, is_causal=True).sum().backward()
        F.linear(torch.randn(2, 3, 4), torch.randn(5, 4))
    assert {own.CPU_FLASH_ATTENTION, own.CPU_FLASH_ATTENTION_BACKWARD, own.unsafe_view} <= seen


def test_many_tensors_at_once() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([[2.0]])]
    assert [float(norm) for norm in own.norms(tensors, torch.float64)] == [5, 2]
    own.multiply_all(tensors, 0.5)
    own.multiply_all(tensors, torch.tensor(2.0))
    own.multiply_all(tensors, 2.0)
    assert [tensor.flatten().tolist() for tensor in tensors] == [[6, 8], [4]]


def test_schemas_and_overloads() -> None:
    assert own.schema_of(ATEN.add_.Tensor).is_mutable
    assert not own.schema_of(ATEN.add.Tensor).is_mutable
    assert own.schema_of(ATEN.add.out).name == "aten::add"
    assert any(argument.is_out for argument in own.schema_of(ATEN.add.out).arguments)


def test_versions_views_and_memory() -> None:
    tensor = torch.zeros(4)
    view, before = tensor[:2], own.version_of(tensor)
    assert own.base_of(view) is tensor
    assert own.base_of(tensor) is None
    view.add_(1)
    assert own.version_of(tensor) == own.version_of(view) == before + 1
    with own.keeping_versions([tensor]):
        tensor.add_(1)
    assert own.version_of(tensor) == before + 1
    assert own.storage_id(view.untyped_storage()) == own.storage_id(tensor.untyped_storage())
    assert own.storage_id(torch.zeros(4).untyped_storage()) != own.storage_id(tensor.untyped_storage())
    assert own.key_set_of(tensor) != own.key_set_of(tensor.to("meta"))


def test_hooks() -> None:
    layer = nn.Linear(2, 2)
    weight, module_hooks = layer.weight, own.hooks_of(layer)
    assert not own.gradient_hooks(weight) and not own.accumulation_hooks(weight)  # noqa: PT018
    assert module_hooks == {"forward": [], "backward": []}
    weight.register_hook(lambda gradient: gradient)
    assert own.gradient_hooks(weight) and not own.accumulation_hooks(weight)  # noqa: PT018
    weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert own.accumulation_hooks(weight)
    before, after = (lambda *_: None), (lambda *_: None)
    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)
    layer.register_full_backward_pre_hook(before)
    layer.register_full_backward_hook(after)
    assert own.hooks_of(layer) == {"forward": [after, before], "backward": [after, before]}


def test_what_is_in_a_module() -> None:
    module = nn.Module()
    module.first = module.second = part = nn.Linear(1, 1, bias=False)
    module.register_buffer("saved", torch.ones(1))
    module.register_buffer("made", torch.ones(1), persistent=False)
    module.register_buffer("absent", None)
    assert own.buffers_of(module).keys() == {"saved", "made", "absent"}
    assert own.parts_of(module) == {"first": part, "second": part}
    assert own.parameters_of(part) == {"weight": part.weight, "bias": None}
    assert (
        own.saved_buffers_of(module).keys()
        == {"saved"}
        == module.state_dict().keys()
        - {
            "first.weight",
            "second.weight",
        }
    )
    assert not own.is_compiled(part)
    part.compile(backend="eager")
    assert own.is_compiled(part)


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout()])
def test_kinds_of_dropout(layer: nn.Module) -> None:
    assert isinstance(layer, own.AnyDropout)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)])
def test_kinds_of_batch_norm(layer: nn.Module) -> None:
    assert isinstance(layer, own.AnyBatchNorm)
    assert not isinstance(nn.GroupNorm(1, 2), own.AnyBatchNorm)


def test_modes_are_left() -> None:
    seen: list[Any] = []

    class Seeing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Marked(torch.Tensor):
        __torch_function__ = own.plain_results

    marked = torch.zeros(2).as_subclass(Marked)
    assert type(marked + 1) is torch.Tensor
    with Seeing():
        with own.no_functions():
            torch.zeros(1)
        assert not seen
        with own.no_subclass_functions():
            torch.zeros(1)
        assert len(seen) == 1
    with own.FakeTensorMode() as mode:
        assert own.fake_mode() is mode
        fake = torch.zeros(2)
        assert isinstance(fake, own.FakeTensor)
        with own.no_modes():
            assert own.fake_mode() is None
            assert type(torch.zeros(2)) is torch.Tensor
        with own.no_dispatch():
            assert type(torch.zeros(2)) is torch.Tensor
    assert own.fake_mode() is None


def test_a_fake_tensor_of_another_memory() -> None:
    """It answers for its memory as those that the mode makes; without, reading it would end the process."""
    mode = own.FakeTensorMode()
    with own.no_dispatch():
        memory = torch.empty(3, device="meta")
    cpu = torch.device("cpu")
    made = own.subclass_of(own.FakeTensor, memory, dispatch_device=True, device_for_backend_keys=cpu)
    with mode:
        vars(made).update(vars(torch.empty(3)), fake_mode=mode)
    own.guard_memory(made, mode)
    assert (made + 1).device == cpu
    assert own.key_set_of(made) == own.key_set_of(mode.from_tensor(torch.empty(3)))


def test_reading_the_values_of_fake_tensors_is_an_error_by_its_kind() -> None:
    with own.FakeTensorMode():
        with pytest.raises(own.DataDependentOutputException):
            bool(torch.zeros(()) > 0)
        with pytest.raises(own.DynamicOutputShapeException):
            torch.zeros(2).nonzero()


def test_nested_values() -> None:
    nested = {"a": [1, 2.5], "b": (3,)}
    leaves, form = own.tree_flatten(nested)
    assert leaves == own.tree_leaves(nested) == [1, 2.5, 3]
    assert own.tree_unflatten(leaves, form) == nested
    assert own.tree_map(lambda leaf: leaf * 2, nested) == {"a": [2, 5.0], "b": (6,)}
    assert own.tree_map_only(float, lambda leaf: "x", nested) == {"a": [1, "x"], "b": (3,)}


def test_operations_are_counted() -> None:
    assert own.flop_registry[ATEN.mm](torch.empty(2, 3), torch.empty(3, 5), out_val=torch.empty(2, 5)) == 2 * 2 * 3 * 5
    shapes = (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)
    assert own.sdpa_flop_count(*shapes) == 2 * (2 * 2 * 4 * 4 * 8)
    assert own.sdpa_backward_flop_count(shapes[0], *shapes) == 5 * (2 * 2 * 4 * 4 * 8)


def test_keys_by_identity() -> None:
    one, other = torch.zeros(1), torch.zeros(1)
    known = own.WeakIdKeyDictionary()
    known[one] = "one"
    assert one in known and other not in known  # noqa: PT018
    del one
    assert len(known) == 0


def test_a_profiler_is_noticed() -> None:
    assert not own.is_profiling()
    with torch.profiler.profile():
        assert own.is_profiling()


def test_a_group_through_the_own_address_and_its_limit() -> None:
    store, limit = dist.HashStore(), timedelta(seconds=30)
    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(lambda rank: own.loopback_group(store, rank, limit), range(2)))
        tensors = [torch.tensor([rank + 1.0]) for rank in range(2)]
        works = list(threads.map(lambda rank: groups[rank].allreduce([tensors[rank]]).wait(), range(2)))
    assert len(works) == 2
    assert [float(tensor) for tensor in tensors] == [3, 3]


def test_the_default_group() -> None:
    """Its store is shared, and it knows its limit, which torch gives to no later group."""
    with pytest.raises(ValueError, match="not been initialized"):
        own.default_store()
    limit = timedelta(seconds=77)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    try:
        assert dist.group.WORLD is not None
        assert own.timeout_of(dist.group.WORLD) == limit
        own.default_store().set("key", "value")
        assert own.default_store().get("key") == b"value"
    finally:
        dist.destroy_process_group()
