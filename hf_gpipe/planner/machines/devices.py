"""Devices and links as data: memory, rates and bandwidths of common ones, from their makers' data sheets.

Rates are the dense peaks, of tensor cores where the type has them, and beside them is what a transformer reaches of
them. In float32 they are those of PyTorch's default, without TF32. A link's bandwidth is in one direction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hf_gpipe.errors import UserError, nearest
from hf_gpipe.partition.cluster import Level
from hf_gpipe.settings.sizes import number_and_unit, read_bytes

Entry = TypeVar("Entry")
_GIB = 1 << 30
#: The seconds that PyTorch takes to start a kernel, autograd and the modules' code included; hosts differ.
_CALL_SECONDS = 1e-5
#: The shares that are reached of a data sheet's rate of products and of its bandwidth. On an H100 of 989
#: TFLOP/s and 3.35 TB/s, a large product reaches 0.78 of the rate (0.73 in float32) and a copy 0.67 of the bandwidth.
#: The layers of a Llama of width 2560 take the time that 0.7 and 0.67 give.
_PRODUCT_SHARE, _MEMORY_SHARE = 0.7, 0.67
#: What GeForce cards reach of the rate that their sheets give for sums in float32, which is half of what their tensor
#: cores could do. LLMQ (arXiv 2512.15306, benchmarks/ of its repository) trains in bfloat16 at 0.95 of it on an RTX
#: 4090 and at 1.0 on an RTX 5060 Ti, recomputation counted, and at 0.6 of an H100's rate.
_GEFORCE_SHARE = 0.95
#: What a CUDA context, with the kernels that torch loads, takes of a device beside torch's allocator. It is the
#: difference between "this process has" and "allocated" plus "reserved" in torch's messages of CUDA out of memory: 0.46
#: and 0.49 GiB on an RTX 4090 (issues 11 of pinokiofactory/flux-webui and 8 of 3DTopia/Phidias-Diffusion on GitHub).
#: XLA reserves 0.52 GiB of a TPU (github.com/sokrypton/ColabFold/issues/62).
#: An H100 was measured with torch 2.11: 0.52 for the context, 0.75 once kernels have run, 0.84 with streams that copy.
_CONTEXT_GIB = 0.5
#: The workspaces of cuBLAS and of cuBLASLt, in MiB: 8.125 and at most 4, and on Hopper and Blackwell 32 each; those of
#: hipBLAS and hipBLASLt on an MI300X are 128 and 76 (parseChosenWorkspaceSize and parseCUDABlasLtWorkspaceSize in
#: ATen/cuda/CublasHandlePool.cpp of pytorch/pytorch, and pull request 120925 there).
_WORKSPACE_MIB = 12.125
#: What a desktop takes of the card that drives its screen: its windows, a browser and the frames of one or two screens.
SCREEN_BYTES = 1 << 30
_BLACKWELL = {"workspace_mib": 64.0}
#: GeForce cards compute twice as fast where products of float16 also sum in float16, by their architectures'
#: whitepapers.
_HALF_SUMS = {"fp16_accumulation": 2.0}
_GEFORCE = {"product_share": _GEFORCE_SHARE, **_HALF_SUMS}
_HOPPER = {**_BLACKWELL, "context_gib": 0.85}


LINKS: dict[str, Level] = {
    name: Level(2, *link)
    for name, link in {
        "nvlink1": (80e9, 5e-6),
        "nvlink2": (150e9, 5e-6),
        "nvlink3": (300e9, 5e-6),
        "nvlink4": (450e9, 5e-6),
        "nvlink5": (900e9, 5e-6),
        # One of the seven links of an MI300X, each to another GPU of its machine.
        "infinity-fabric": (64e9, 5e-6),
        # The bandwidths that a copy reaches; the nominal ones are 15.75, 31.5 and 63 GB/s.
        "pcie3": (12.5e9, 1e-5),
        "pcie4": (25e9, 1e-5),
        "pcie5": (50e9, 1e-5),
        "ethernet-10": (1.25e9, 5e-5),
        "ethernet-25": (3.125e9, 5e-5),
        "ethernet-100": (12.5e9, 3e-5),
        "infiniband-200": (25e9, 5e-6),
        "infiniband-400": (50e9, 5e-6),
        "tpu-v3": (82e9, 5e-6),
        # Sockets between processes of one machine, whose CPU copies each byte.
        "loopback": (2e9, 1e-4),
    }.items()
}


@dataclass(frozen=True)
class Host:
    """The machine of some devices, whose memory and CPU they use.

    Values that nobody gave are usual ones, and not measured.

    Attributes:
        link: the link between a device and this memory; its bandwidth is in one direction.
        devices_per_link: the number of devices that share such a link, as behind one PCIe switch.
        bytes_per_second: the bandwidth of the memory, for all processes of the machine together.
        process_bytes_per_second: the most bandwidth that one process gets.
        memory_bytes: the bytes that weights and graphs in its memory may use; None: not known.
        disk_bytes_per_second: the bytes that all processes read and write on its disk.
    """

    link: Level = LINKS["pcie4"]
    devices_per_link: int = 1
    bytes_per_second: float = 1e11
    process_bytes_per_second: float = 2e10
    memory_bytes: int | None = None
    disk_bytes_per_second: float = 3e9

    def copy_rate(self, num_devices: int, ways: int = 1) -> float:
        """The bytes a second between the memory and each of `num_devices` that copy at once, in one direction (`ways`
        1) or in both (2)."""
        shared = self.link.bytes_per_second / min(self.devices_per_link, num_devices)
        return min(shared, self.bytes_per_second / (num_devices * ways))

    def process_rate(self, num_processes: int) -> float:
        """The bytes a second of the memory for each of `num_processes` that read and write at once."""
        return min(self.process_bytes_per_second, self.bytes_per_second / num_processes)

    def disk_rate(self, num_processes: int) -> float:
        """The bytes a second on the disk of each of `num_processes` that read and write at once."""
        return self.disk_bytes_per_second / num_processes


@dataclass(frozen=True)
class Device:
    """The device of a process.

    Attributes:
        name: as a user writes it.
        memory_bytes: the bytes that a process may use; None: not known.
        flops_per_second: the peak rates by the type of a matrix product's factors, such as "bfloat16"; float32 is
            always there.
        bytes_per_second: the bandwidth of its memory.
        link: the link to the device of the next stage.
        reserved_share: the bytes that the allocator holds without using them, freed blocks that fit nothing, per byte
            that waits between actions: graphs and messages. For GPUs it is measured on an H100 (docs/gpu.md); glibc's
            allocator on a CPU keeps freed memory below what is still alive (docs/planner.md).
        reserved_working_share: the bytes that the allocator holds so per byte of gradients and of working memory,
            whose sizes differ more.
        call_seconds: the host's time for one operation, however small.
        has_host: whether another processor prepares its next operation while it computes and moves bytes, so
            that the longer time of the two counts. A CPU does both in turn.
        host: the machine that it is in.
        workspace_bytes: the bytes that cuBLAS takes of its memory; None: it has no CUDA.
        product_share, memory_share: the shares that a transformer reaches of `flops_per_second` and of
            `bytes_per_second`; 1 where these were measured.
        fp16_accumulation: the factor of the rate in float16 where products also sum in float16.
    """

    name: str
    memory_bytes: int | None
    flops_per_second: Mapping[str, float]
    bytes_per_second: float
    link: Level
    reserved_share: float = 0.1
    reserved_working_share: float = 0.35
    call_seconds: float = 0.0
    has_host: bool = True
    host: Host = Host()
    workspace_bytes: int | None = None
    product_share: float = 1.0
    memory_share: float = 1.0
    fp16_accumulation: float = 1.0

    def seconds(self, arithmetic_seconds: float, moved_bytes: float, calls: int) -> float:
        """The seconds of some operations in turn: products that compute for `arithmetic_seconds`, and others that move
        `moved_bytes`, in `calls` calls together."""
        parts = arithmetic_seconds + moved_bytes / self.memory_rate, calls * self.call_seconds
        return max(parts) if self.has_host else sum(parts)

    @property
    def memory_rate(self) -> float:
        """The bytes a second that operations reach."""
        return self.memory_share * self.bytes_per_second

    def product_rate(self, dtype: str) -> float:
        """The operations a second that matrix products reach."""
        return self.product_share * self.flops_for(dtype)

    def summing_in_float16(self) -> Device:
        """The device where products of float16 also sum in float16. Raises UserError where this is not faster."""
        if self.fp16_accumulation == 1:
            cards = ", ".join(name for name, known in DEVICES.items() if known.fp16_accumulation > 1)
            raise UserError(
                f"fp16_accumulation is true, and {self.name} is not known to be faster where products sum in "
                f"float16, only less exact; leave it out. GeForce cards gain: {cards}."
            )
        rates = {**self.flops_per_second, "float16": self.fp16_accumulation * self.flops_for("float16")}
        return replace(self, flops_per_second=rates)

    def flops_for(self, dtype: str) -> float:
        """The peak rate of matrix products. A type that is not listed has float32's rate, and float64 half of it."""
        half = 0.5 if dtype == "float64" else 1.0
        return self.flops_per_second.get(dtype, half * self.flops_per_second["float32"])


def _gpu(
    name: str,
    memory_gib: float,
    terabytes: float,
    link: str,
    *,
    fp32: float,
    fp16: float,
    bf16: float | None,
    workspace_mib: float | None = _WORKSPACE_MIB,
    context_gib: float = _CONTEXT_GIB,
    product_share: float = _PRODUCT_SHARE,
    fp16_accumulation: float = 1.0,
) -> Device:
    """A device of the table below: the GiB that its driver reports, 10^12 bytes a second of its memory, and 10^12
    operations a second; `workspace_mib` None: it has no CUDA."""
    rates = {"float32": fp32 * 1e12, "float16": fp16 * 1e12}
    if bf16 is not None:
        rates["bfloat16"] = bf16 * 1e12
    memory_bytes = round((memory_gib - context_gib) * _GIB)
    workspace = None if workspace_mib is None else int(workspace_mib * (1 << 20))
    return Device(
        *(name, memory_bytes, rates, terabytes * 1e12, LINKS[link]),
        call_seconds=_CALL_SECONDS,
        workspace_bytes=workspace,
        product_share=product_share,
        memory_share=_MEMORY_SHARE,
        fp16_accumulation=fp16_accumulation,
    )


#: The memory is the "total capacity" in torch's messages of CUDA out of memory, rounded down to tenths of a GiB: the
#: driver keeps a part of what the data sheet says, and so does error correction on a T4, an L4, an L40S or an A10.
#: Rates in half precision are those of sums in float32, which a GeForce card has in its architecture's whitepaper: half
#: of what its specifications begin with.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _gpu("p100", 15.8, 0.732, "pcie3", fp32=9.3, fp16=18.7, bf16=None),
        _gpu("v100-16", 15.7, 0.9, "nvlink2", fp32=15.7, fp16=125, bf16=None),
        _gpu("v100-32", 31.7, 0.9, "nvlink2", fp32=15.7, fp16=125, bf16=None),
        _gpu("t4", 14.5, 0.32, "pcie3", fp32=8.1, fp16=65, bf16=None),
        _gpu("a100-40", 39.3, 1.555, "nvlink3", fp32=19.5, fp16=312, bf16=312),
        _gpu("a100-80", 79.1, 2.039, "nvlink3", fp32=19.5, fp16=312, bf16=312),
        _gpu("l4", 22.0, 0.3, "pcie4", fp32=30.3, fp16=121, bf16=121),
        _gpu("h100", 79.1, 3.35, "nvlink4", fp32=67, fp16=989, bf16=989, **_HOPPER),
        _gpu("h200", 139.7, 4.8, "nvlink4", fp32=67, fp16=989, bf16=989, **_HOPPER),
        # NVIDIA HGX B200 data sheet: 36 PFLOP/s of 8 GPUs with sparsity.
        _gpu("b200", 178.3, 7.7, "nvlink5", fp32=75, fp16=2250, bf16=2250, **_HOPPER),
        # AMD Instinct MI300X data sheet.
        _gpu("mi300x", 191.6, 5.3, "infinity-fabric", fp32=163.4, fp16=1307.4, bf16=1307.4, workspace_mib=204),
        # NVIDIA A10, L40S and RTX A6000 data sheets (tests/gpu/peaks.py).
        _gpu("a10", 22.0, 0.6, "pcie4", fp32=31.2, fp16=125, bf16=125),
        _gpu("l40s", 44.3, 0.864, "pcie4", fp32=91.6, fp16=362.05, bf16=362.05),
        _gpu("rtxa6000", 47.5, 0.768, "pcie4", fp32=38.7, fp16=154.8, bf16=154.8),
        # NVIDIA RTX 6000 Ada Generation data sheet: 1457 in 8 bits with sparsity.
        _gpu("rtx6000-ada", 47.4, 0.96, "pcie4", fp32=91.1, fp16=364.2, bf16=364.2),
        # NVIDIA GeForce RTX 3060 specifications: 102 with sparsity and sums in float16.
        _gpu("rtx3060", 11.6, 0.36, "pcie4", fp32=12.7, fp16=25.5, bf16=25.5, **_HALF_SUMS),
        _gpu("rtx3090", 23.6, 0.936, "pcie4", fp32=35.6, fp16=71, bf16=71, **_HALF_SUMS),
        _gpu("rtx4080", 15.6, 0.717, "pcie4", fp32=48.7, fp16=97.5, bf16=97.5, **_GEFORCE),
        _gpu("rtx4090", 23.6, 1.008, "pcie4", fp32=82.6, fp16=165, bf16=165, **_GEFORCE),
        _gpu("rtx5080", 15.4, 0.96, "pcie5", fp32=56.3, fp16=112.6, bf16=112.6, **_BLACKWELL, **_GEFORCE),
        _gpu("rtx5090", 31.3, 1.792, "pcie5", fp32=104.8, fp16=209.5, bf16=209.5, **_BLACKWELL, **_GEFORCE),
        # NVIDIA DGX Spark: a GB10, whose memory the CPU shares, and whose port has 200 Gbit/s. Its sheet says 1 PFLOP/s
        # in 4 bits with sparsity, eight times the rate in half precision.
        _gpu("dgx-spark", 121.6, 0.273, "infiniband-200", fp32=31, fp16=125, bf16=125, **_BLACKWELL),
        # It is one of the two cores of a chip, GPipe's accelerator; products of float32 run in bfloat16.
        _gpu("tpu-v3", 16, 0.45, "tpu-v3", fp32=61.5, fp16=61.5, bf16=61.5, workspace_mib=None),
    )
}


#: Entries whose GPU has another name for torch.
_KNOWN_AS = {"gb10": "dgx-spark"}
#: The entries for other GPUs: a compute capability -> an entry of that generation. The newest up to the GPU's is used.
_OF_CAPABILITY = {
    (0, 0): "p100",
    (7, 0): "v100-16",
    (7, 5): "t4",
    (8, 0): "a100-40",
    (8, 6): "rtx3090",
    (8, 9): "l4",
    (9, 0): "h100",
    (10, 0): "b200",
    (12, 0): "rtx5090",
}


def like_gpu(name: str, memory_bytes: int, capability: tuple[int, int]) -> Device:
    """The data sheet of a GPU that torch has found. A GPU that is not in the table gets an entry of its generation.

    Args:
        name: torch's name, such as "NVIDIA A100-SXM4-80GB".
        memory_bytes: the GPU's whole memory.
        capability: its compute capability.
    """
    words = re.sub(r"\brtx (?=\w)", "rtx", name.lower())
    # The end of "a100-40" is its memory.
    names = {entry: re.sub(r"-\d+$", "", entry).replace("-", "[ -]") for entry in DEVICES}
    names |= {entry: known for known, entry in _KNOWN_AS.items()}
    if sheets := [DEVICES[entry] for entry, known in names.items() if re.search(rf"\b{known}\b", words)]:
        sheet = min(sheets, key=lambda sheet: abs((sheet.memory_bytes or 0) - memory_bytes))
        return replace(sheet, link=LINKS["pcie4"]) if "pcie" in words else sheet
    entry = _OF_CAPABILITY[max(known for known in _OF_CAPABILITY if known <= capability)]
    return replace(DEVICES[entry], link=LINKS["pcie4"])


def cpu(num_threads: int) -> Device:
    """A process on the CPU of a server of the last ten years with `num_threads`; its memory is not known.

    A core with AVX2 begins two fused multiplications and additions of eight float32 in each cycle, so 32 operations,
    at about 3 GHz. A channel of DDR4-3200 has 25.6 GB/s, and about two cores share one. With 0.55 of the rate, the
    estimates of blocks and heads of six small models were 1.06 and 1.3 times what two runs took on a core of an EPYC.
    """
    rates = {"float32": 1e11 * num_threads, "float64": 0.5e11 * num_threads}
    own = Device("cpu", None, rates, 12.8e9 * num_threads, LINKS["loopback"], has_host=False)
    return replace(own, call_seconds=_CALL_SECONDS, product_share=0.55)


def device(name: str, link: str | None = None) -> Device:
    """A device of the table, by its name or by torch's, in any letters and with any spaces, dashes and underscores.

    Args:
        name: the name, for example "a100-80".
        link: the name of the link to the next device; None: the usual link.

    Raises:
        UserError: an unknown device or link.
    """
    known = {known: DEVICES[entry] for known, entry in _KNOWN_AS.items()} | DEVICES
    others = "for another card give --flops, --bandwidth and --memory from its data sheet"
    entry = _find("device", name, known, DEVICES, others)
    return entry if link is None else replace(entry, link=link_between(link))


def link_between(name: str, what: str = "link") -> Level:
    """A link of the table by its name, or one by its bandwidth, such as "25GB/s" or "100Gb/s".

    Args:
        name: the name or the bandwidth.
        what: the words for the link in error messages.

    Raises:
        UserError: the text is neither.
    """
    if name[:1].isdigit():
        return Level(2, read_bandwidth(name, f"the {what}"), LINKS["ethernet-100"].latency_seconds)
    return _find(what, name, LINKS, LINKS, "or give a rate, such as 25GB/s")


def read_host(
    link: str | None, memory: str | None, bandwidth: str | None, usual: Host = Host(), disk: str | None = None
) -> Host:
    """Read the host of the command's options.

    Args:
        usual: the host whose values count where an option is None.
        link: a link as in `link_between`; "/2" behind it: two devices share a link.
        memory: the size of the memory, such as "256GiB".
        bandwidth: the bandwidth of the memory, such as "100GB/s".
        disk: the bandwidth of the disk, such as "5GB/s".

    Raises:
        UserError: one of them cannot be read.
    """
    values: dict[str, Any] = {}
    if link is not None:
        name, count = match.groups() if (match := re.fullmatch(r"(.*)/(\d+)", link)) else (link, None)
        if count is not None and int(count) < 1:
            raise UserError(f"--host-link is {link!r}: at least one device has a link; write for example pcie4/2.")
        values["link"] = link_between(name, "link of --host-link")
        values |= {} if count is None else {"devices_per_link": int(count)}
    if memory is not None:
        values["memory_bytes"] = read_bytes(memory, "--host-memory")
    if bandwidth is not None:
        # A process with all cores gets all of it.
        rates = ("bytes_per_second", "process_bytes_per_second")
        values |= dict.fromkeys(rates, read_bandwidth(bandwidth, "--host-bandwidth"))
    if disk is not None:
        values["disk_bytes_per_second"] = read_bandwidth(disk, "--disk-bandwidth")
    return replace(usual, **values)


def custom(memory_bytes: int | None, flops_per_second: float, bytes_per_second: float, link: Level) -> Device:
    """A device that is in no table, with one rate for all types. Both rates are from its data sheet."""
    rates = {"float32": flops_per_second, "float64": flops_per_second}
    own = Device("given", memory_bytes, rates, bytes_per_second, link, call_seconds=_CALL_SECONDS)
    return replace(own, product_share=_PRODUCT_SHARE, memory_share=_MEMORY_SHARE)


def read_flops(text: str, name: str) -> float:
    """Read operations a second from a text such as "312TFLOPS" or "15.7 TFLOP/s".

    Raises:
        UserError: the text is not a rate, or has no unit.
    """
    number, unit = number_and_unit(text, name, "a rate", "312TFLOPS")
    match = re.fullmatch(r"([kmgtp]?)flops?(/s)?", unit.lower())
    if match is None:
        raise UserError(f"{name} is {text!r}; the unit {unit!r} is not one of MFLOPS, GFLOPS, TFLOPS, PFLOPS.")
    return number * _PREFIXES[match[1]]


def read_bandwidth(text: str, name: str) -> float:
    """Read bytes a second from a text such as "900GB/s" or, in bits, "100Gb/s" or "100Gbit/s".

    Raises:
        UserError: the text is not a bandwidth, or has no unit.
    """
    number, unit = number_and_unit(text, name, "a rate", "900GB/s")
    match = re.fullmatch(r"([kKmMgGtT]?)(i?)(B|b|bit)(?:/s|ps)", unit)
    if match is None:
        raise UserError(f"{name} is {text!r}; the unit {unit!r} is not one of MB/s, GB/s, TB/s, GiB/s, Gb/s.")
    prefix, binary, base = match.groups()
    factor = 1024.0 ** _POWERS[prefix.lower()] if binary else _PREFIXES[prefix.lower()]
    return number * factor / (1 if base == "B" else 8)


_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_PREFIXES = {prefix: 1000.0**power for prefix, power in _POWERS.items()}


def _find(what: str, name: str, known: Mapping[str, Entry], named: Iterable[str], others: str) -> Entry:
    """The entry of a name. Raises UserError with the names of the table and what to do for others."""
    plain = {_plain(key): key for key in known}
    if (key := _plain(name)) not in plain:
        hint = nearest(name.strip().lower(), named)
        raise UserError(f"the {what} {name!r} is unknown; known are {', '.join(named)}; {others}{hint}")
    return known[plain[key]]


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()
