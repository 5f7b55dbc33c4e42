"""Devices, links and rates as a user names them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_gpipe.errors import UserError
from hf_gpipe.planner.costs import measure
from hf_gpipe.planner.costs.measure import this_machine
from hf_gpipe.planner.machines.devices import (
    DEVICES,
    LINKS,
    Host,
    custom,
    device,
    link_between,
    read_bandwidth,
    read_flops,
)


def test_a_device_by_its_name() -> None:
    a100 = device(" A100-80 ", "ethernet-100")
    assert a100.memory_bytes == round(78.6 * 2**30)
    assert a100.flops_for("bfloat16") == 312e12
    assert a100.flops_for("float32") == 19.5e12
    assert a100.flops_for("float64") == 19.5e12 / 2
    assert a100.link.seconds(12.5e9) == pytest.approx(1 + 3e-5)
    assert device("a100-80").link == LINKS["nvlink3"]


def test_a_type_without_a_rate_has_float32s() -> None:
    assert device("v100-16").flops_for("bfloat16") == device("v100-16").flops_for("float32")


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"device 'a100-8' is unknown.*did you mean 'a100-80'"):
        device("a100-8")
    with pytest.raises(UserError, match=r"device 'a100' is unknown.*did you mean 'a100-40' or 'a100-80'"):
        device("a100")
    with pytest.raises(UserError, match=r"for another card give --flops, --bandwidth and --memory .*'rtx4090'"):
        device("RTX 4090 Ti")
    with pytest.raises(UserError, match=r"link 'nvlink9' is unknown; known are nvlink1.*or give a rate"):
        device("h100", "nvlink9")


def test_sums_in_float16_double_a_geforce_card_s_rate() -> None:
    card = device("rtx4090").summing_in_float16()
    assert card.flops_for("float16") == 330e12
    assert card.flops_for("bfloat16") == 165e12
    with pytest.raises(UserError, match="h100 is not known to be faster"):
        device("h100").summing_in_float16()


@pytest.mark.parametrize("name", ["RTX A6000", "rtx-a6000", "rtx_a6000"])
def test_a_device_by_its_makers_name(name: str) -> None:
    """`--device "RTX 3090"` was unknown, though it is what the card is called."""
    assert device(name) is DEVICES["rtxa6000"]
    assert device("GB10") is DEVICES["dgx-spark"]


@pytest.mark.parametrize(
    ("text", "rate"),
    [("312TFLOPS", 312e12), ("15.7 TFLOP/s", 15.7e12), ("900gflops", 900e9), ("1PFLOPS", 1e15), ("3 flops", 3)],
)
def test_rates(text: str, rate: float) -> None:
    assert read_flops(text, "--flops") == rate


@pytest.mark.parametrize(
    ("text", "rate"),
    [("900GB/s", 900e9), ("100Gb/s", 12.5e9), ("100Gbit/s", 12.5e9), ("1 GiB/s", 2**30), ("10Gbps", 1.25e9)],
)
def test_bandwidths(text: str, rate: float) -> None:
    assert read_bandwidth(text, "--bandwidth") == rate
    assert link_between(text).bytes_per_second == rate


@pytest.mark.parametrize("text", ["312", "fast", "-1TFLOPS", "0TFLOPS", "3TB"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(UserError, match="--flops is"):
        read_flops(text, "--flops")


@pytest.mark.parametrize("text", ["900", "900GB", "GB/s", "0GB/s", "5 parsecs/s"])
def test_what_is_no_bandwidth(text: str) -> None:
    with pytest.raises(UserError, match="--bandwidth is"):
        read_bandwidth(text, "--bandwidth")


def test_every_device_of_the_table_is_whole() -> None:
    for name, entry in DEVICES.items():
        assert entry.name == name
        assert entry.flops_per_second["float32"] <= entry.flops_for("float16")
        assert entry.memory_bytes
        assert entry.bytes_per_second > entry.link.bytes_per_second


@pytest.mark.parametrize(
    ("name", "reported_gib"),
    # What torch says on such a card: "GPU 0 has a total capacity of 23.64 GiB".
    [
        *(("rtx4090", 23.64), ("rtx3090", 23.69), ("v100-16", 15.77), ("a100-40", 39.38), ("h100", 79.1)),
        *(("t4", 14.57), ("rtx5090", 31.36), ("rtx5080", 15.47), ("rtxa6000", 47.54), ("l40s", 44.4)),
        *(("mi300x", 191.69), ("b200", 178.35), ("dgx-spark", 121.69)),
    ],
)
def test_a_plan_may_use_what_the_driver_reports_less_a_context(name: str, reported_gib: float) -> None:
    """A plan that filled all 24 GiB of a card by its name was out of memory on the card, which had 23.1 GiB for it."""
    usable = (device(name).memory_bytes or 0) / 2**30
    most = 0.95 if name in ("h100", "b200") else 0.65
    assert reported_gib - most < usable < reported_gib - 0.45


def test_a_given_device_has_one_rate() -> None:
    given = custom(None, 1e12, 1e11, LINKS["pcie4"])
    assert given.flops_for("bfloat16") == given.flops_for("float64") == 1e12


def test_this_machine() -> None:
    found = this_machine(torch.device("cpu"), num_processes=2)
    whole = this_machine(torch.device("cpu"))
    assert found.memory_bytes == (whole.memory_bytes or 0) // 2
    assert found.flops_for("float32") > 1e8
    assert found.bytes_per_second > 1e8
    assert found.link.bytes_per_second > 1e7


def test_the_memory_of_a_gpu_is_what_is_free_and_what_this_process_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_matrix_rate", "_memory_rate", "_call_seconds"):
        monkeypatch.setattr(measure, name, lambda *_: 1e9)
    monkeypatch.setattr(measure, "_host_of", lambda _: Host())
    gpu = torch.device("cuda", 7)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    properties = SimpleNamespace(name="a GPU", total_memory=80 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (30 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 10 << 30)
    assert this_machine(gpu).memory_bytes == (40 << 30) - measure._KERNELS_BYTES
    assert this_machine(gpu).workspace_bytes == DEVICES["h100"].workspace_bytes
