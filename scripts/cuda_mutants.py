"""Break the code for CUDA one line at a time, and see that a test on the emulated devices fails each time.

    python scripts/cuda_mutants.py                        all mutants, two at a time; prints a table
    python scripts/cuda_mutants.py --only event sync      those whose name has one of these words
    python scripts/cuda_mutants.py --list                 what there is, and why it is wrong on a GPU
    python scripts/cuda_mutants.py --root FOLDER          with the package and the tests of another checkout

Each mutant is written into a copy of the package and the tests, and the tests of tests/emulated_cuda run there until
one fails. A mutant survives if none does. First the copies run unchanged, which must pass. The exit code is 1 if a
mutant survives, and 2 if one does not fit the package, or the tests fail without it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: What the tests need of a checkout.
COPIED = ("hf_gpipe", "tests", "scripts", "recipes", "pyproject.toml")
#: The tests in the order in which they find most in least time, without those of the emulation itself.
TESTS = (
    "test_happens_before.py",
    "test_host_copies.py",
    "test_edges.py",
    "test_host_waits.py",
    "test_one_process.py",
    "test_processes.py",
    "test_offloading.py",
    "test_use.py",
    "test_saving.py",
    "test_measuring.py",
)
#: Tests that make mutants themselves would fail because a line is not as they know it.
KEPT = "not a_line_less"
#: Seconds after which a mutant counts as one that hangs, which is noticed.
LIMIT = 1800


@dataclass(frozen=True)
class Mutant:
    """A change of the package.

    Attributes:
        name: of the change.
        file: in hf_gpipe/.
        old: a text that the file has once.
        new: what stands there instead.
        why: what goes wrong on a GPU.
    """

    name: str
    file: str
    old: str
    new: str
    why: str


CHANNEL, EDGES, HOST = "runtime/channel.py", "runtime/edges.py", "runtime/host.py"
COPIES, MASTER, REPLICAS = "checkpoint/copies.py", "training/master_weights.py", "runtime/replicas.py"
MICRO_BATCH, NORM, TIES, TIMING = (f"runtime/{name}.py" for name in ("micro_batch", "gradient_norm", "ties", "timing"))
SHARDS, EXECUTOR, PREDICTING = "runtime/shards.py", "runtime/executor.py", "training/predicting.py"
STALE_COPY = "the host reads pinned memory before its copy has ended"
WAITS = "the host waits more than once in a step"

MUTANTS = (
    # between two devices of a process
    Mutant(
        "event on the leaving stream",
        CHANNEL,
        "arriving.record_event()",
        "leaving.record_event()",
        "without peer access the last part of a strided copy runs on the arriving stream",
    ),
    Mutant(
        "streams swapped",
        CHANNEL,
        "leaving, arriving = self._streams",
        "arriving, leaving = self._streams",
        "the copy's first part runs on a stream that has not waited for the tensor",
    ),
    Mutant(
        "arriving waits in place of leaving",
        CHANNEL,
        "leaving.wait_stream(torch.cuda.current_stream(self._source))",
        "arriving.wait_stream(torch.cuda.current_stream(self._source))",
        "the same",
    ),
    Mutant(
        "no wait_stream",
        CHANNEL,
        "leaving.wait_stream(torch.cuda.current_stream(self._source))",
        "pass",
        "a tensor is copied before it is computed",
    ),
    Mutant(
        "wait_stream of the target",
        CHANNEL,
        "leaving.wait_stream(torch.cuda.current_stream(self._source))",
        "leaving.wait_stream(torch.cuda.current_stream(self._target))",
        "a tensor is copied before it is computed",
    ),
    Mutant(
        "no wait_event", CHANNEL, "        stream.wait_event(arrived)\n", "", "a copy is read before it has arrived"
    ),
    Mutant(
        "wait_event on the arriving stream",
        CHANNEL,
        "stream.wait_event(arrived)",
        "self._streams[1].wait_event(arrived)",
        "a copy is read before it has arrived",
    ),
    Mutant(
        "no record_stream of what leaves",
        CHANNEL,
        "tensor.record_stream(leaving)",
        "pass",
        "its memory is reused while it is copied",
    ),
    Mutant(
        "no record_stream of what arrived",
        CHANNEL,
        "copy.record_stream(stream)",
        "pass",
        "its memory is reused while it is read",
    ),
    Mutant(
        "record_stream of the arriving stream",
        CHANNEL,
        "copy.record_stream(stream)",
        "copy.record_stream(self._streams[1])",
        "its memory is reused while it is read",
    ),
    Mutant(
        "copies on the receiver's stream",
        CHANNEL,
        "with torch.cuda.stream(arriving), torch.cuda.stream(leaving):",
        "with torch.cuda.stream(leaving):",
        "the receiving device waits for a copy that it does not need yet",
    ),
    Mutant(
        "copies on the sender's stream",
        CHANNEL,
        "with torch.cuda.stream(arriving), torch.cuda.stream(leaving):",
        "with torch.cuda.stream(arriving):",
        "the sending device computes nothing while it copies",
    ),
    Mutant(
        "no streams between devices",
        EDGES,
        'if source != target and source.type == target.type == "cuda":',
        "if False:",
        "both devices compute nothing while they copy",
    ),
    # between two processes
    Mutant(
        "send without contiguous",
        CHANNEL,
        "tensors[name].contiguous()",
        "tensors[name]",
        "NCCL sends memory as it lies, and the receiver gets the values in another order",
    ),
    Mutant(
        "sent tensors are not kept",
        CHANNEL,
        "message.append((work, tensor))",
        "message.append((work, work))",
        "memory is reused while it is sent",
    ),
    Mutant(
        "sent tensors are dropped at the next send",
        CHANNEL,
        "if not all(work.is_completed() for work, _ in self._sent[oldest]):",
        "if not self._sent[oldest]:",
        "memory is reused while it is sent",
    ),
    Mutant(
        "flush does not wait",
        CHANNEL,
        "            sent.wait()\n",
        "            pass\n",
        "memory is reused while it is sent",
    ),
    Mutant(
        "received tensors are not waited for",
        CHANNEL,
        "            work.wait()\n",
        "            pass\n",
        "a message is read before it has arrived",
    ),
    Mutant(
        "only the first tensor is waited for",
        CHANNEL,
        "for _, _, work in message:",
        "for _, _, work in message[:1]:",
        "a message is read before it has arrived",
    ),
    Mutant(
        "a receive that is posted early",
        "schedule/messages.py",
        "passed[receiver])",
        "max(0, passed[receiver] - 2))",
        "two devices wait for each other's messages",
    ),
    Mutant(
        "one communicator for both directions",
        EDGES,
        "links = {link: _communicator(world, link) for link in communicators(world.placement)}",
        "shared = {frozenset(link[:2]): link for link in communicators(world.placement)}\n"
        "    made = {link: _communicator(world, link) for link in shared.values()}\n"
        "    links = {link: made[shared[frozenset(link[:2])]] for link in communicators(world.placement)}",
        "a message waits for one in the other direction",
    ),
    Mutant(
        "communicators are not set up",
        EDGES,
        "if world.rank in (sender, receiver):",
        "if False:",
        "two processes wait for each other in the first step",
    ),
    Mutant(
        "communicators are set up without waiting",
        EDGES,
        "        torch.cuda.synchronize(device)\n",
        "",
        "a communicator is set up while a message of another one is under way",
    ),
    Mutant(
        "communicators of the other end's device",
        EDGES,
        "link.sender_device if is_sender else link.receiver_device",
        "link.receiver_device if is_sender else link.sender_device",
        "a communicator is on another device than its messages",
    ),
    Mutant(
        "processes keep the first device as current",
        "job/device_choice.py",
        "torch.cuda.set_device(torch.device(devices[0]))",
        "pass",
        "every process takes memory on the first device",
    ),
    # replicas, ties and shards
    Mutant(
        "sums over replicas are not waited for",
        REPLICAS,
        "            bucket.work.wait()\n",
        "",
        "gradients are used before they are summed",
    ),
    Mutant(
        "sums of tied gradients are not waited for",
        TIES,
        "dist.reduce(piece, dst=tie.owners[0], group=tie.group)",
        "dist.reduce(piece, dst=tie.owners[0], group=tie.group, async_op=True)",
        "gradients are used before they are summed",
    ),
    Mutant(
        "copies of tied weights are not waited for",
        TIES,
        "dist.broadcast(piece, src=tie.owners[0], group=tie.group)",
        "dist.broadcast(piece, src=tie.owners[0], group=tie.group, async_op=True)",
        "weights are read before they have arrived",
    ),
    Mutant(
        "ties share a communicator over devices",
        TIES,
        "(rank, everyone[rank][stage][0])",
        '(rank, "cuda")',
        "processes number their communicators differently",
    ),
    Mutant(
        "shards are not waited for",
        SHARDS,
        "started(work).wait()",
        "started(work)",
        "weights are read before they have arrived",
    ),
    # what the host reads
    Mutant(
        "loss and norm are read early",
        HOST,
        "    torch.cuda.current_stream(device).synchronize()\n",
        "",
        STALE_COPY,
    ),
    Mutant(
        "loss and norm wait for the current device",
        HOST,
        "torch.cuda.current_stream(device).synchronize()",
        "torch.cuda.current_stream().synchronize()",
        STALE_COPY,
    ),
    Mutant("loss and norm go to memory that is not pinned", HOST, ", pin_memory=True", "", WAITS),
    Mutant(
        "each number is read by itself",
        HOST,
        "together = _joined([part.to(device, non_blocking=True) for part in parts if part.is_cuda])",
        "together = _joined([torch.tensor(part.item(), device=device) for part in parts if part.is_cuda])",
        WAITS,
    ),
    Mutant(
        "loss is read when its micro-batch ends",
        EXECUTOR,
        "                    result.outputs[planned.index] = message\n",
        "                    result.outputs[planned.index] = message\n"
        '                    message["loss"].sum().item()\n',
        WAITS,
    ),
    Mutant(
        "loss is read before the norm",
        NORM,
        "values = iter(read([value for parts in (*losses, *squares) for value in parts]).tolist())",
        "values = iter([n for some in (losses, squares) for n in read([v for parts in some for v in parts]).tolist()])",
        WAITS,
    ),
    Mutant("norms are computed on the host", NORM, "if gradients[0].is_cuda:", "if False:", WAITS),
    # copies between host and device
    Mutant(
        "micro-batches are not pinned", MICRO_BATCH, "tensor.contiguous().pin_memory()", "tensor.contiguous()", WAITS
    ),
    Mutant(
        "micro-batches are pinned as they lie",
        MICRO_BATCH,
        "tensor.contiguous().pin_memory()",
        "tensor.pin_memory()",
        "a strided copy goes through memory that is not pinned",
    ),
    Mutant(
        "micro-batches are copied blocking",
        MICRO_BATCH,
        "tensor.to(device, non_blocking=True)",
        "tensor.to(device)",
        WAITS,
    ),
    Mutant(
        "mini-batches on a device are read early",
        "job/wire.py",
        "tensor.cpu().clone(",
        'tensor.to("cpu", non_blocking=True).clone(',
        STALE_COPY,
    ),
    Mutant(
        "rows on a device are read early",
        MICRO_BATCH,
        "batch = {name: tensor.cpu() for name",
        'batch = {name: tensor.to("cpu", non_blocking=True) for name',
        STALE_COPY,
    ),
    Mutant(
        "copies for files are not waited for",
        COPIES,
        "torch.cuda.current_stream(device).synchronize()",
        "pass",
        STALE_COPY,
    ),
    Mutant(
        "copies of one device are waited for",
        COPIES,
        "for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:",
        "for device in [tensor.device for tensor in tensors.values() if tensor.is_cuda][:1]:",
        STALE_COPY,
    ),
    Mutant(
        "copies for files are pageable",
        COPIES,
        't.detach().contiguous().to("cpu", non_blocking=True)',
        "t.detach().contiguous().cpu()",
        "the host waits for each tensor",
    ),
    Mutant(
        "copies for files keep their strides",
        COPIES,
        "t.detach().contiguous().to(",
        "t.detach().to(",
        "files are written from memory that is not in the order of the tensor",
    ),
    Mutant(
        "offloaded weights are not pinned",
        MASTER,
        '"pin_memory": True',
        '"pin_memory": False',
        "the host waits for each tensor",
    ),
    Mutant(
        "offloaded shards are not pinned",
        MASTER,
        "else self._copy(part)",
        "else part.clone()",
        "the host waits for each tensor",
    ),
    Mutant(
        "offloaded gradients are read early",
        MASTER,
        "gradients = on_cpu(gradients)",
        'gradients = {name: value.to("cpu", non_blocking=True) for name, value in gradients.items()}',
        STALE_COPY,
    ),
    Mutant(
        "offloaded weights travel while they are updated",
        MASTER,
        "gradients = on_cpu(gradients)",
        'gradients = {name: torch.empty_like(value, device="cpu").copy_(value) for name, value in gradients.items()}',
        "the host waits for each tensor",
    ),
    Mutant(
        "predictions are read early",
        PREDICTING,
        "kept.detach().cpu()",
        'kept.detach().to("cpu", non_blocking=True)',
        STALE_COPY,
    ),
    Mutant(
        "generated tokens are read early",
        "runtime/generation.py",
        "tokens = self._generated(part_of(shared, own, num_parts)).cpu()",
        'tokens = self._generated(part_of(shared, own, num_parts)).to("cpu", non_blocking=True)',
        STALE_COPY,
    ),
    # times and random numbers
    Mutant(
        "times are read early",
        TIMING,
        "        self.synchronize()\n",
        "",
        "an event has not been reached, and CUDA raises an error",
    ),
    Mutant(
        "events on the current device",
        TIMING,
        "event.record(torch.cuda.current_stream(device))",
        "event.record(torch.cuda.current_stream())",
        "events of two devices have no time between them, and CUDA raises an error",
    ),
    Mutant(
        "random numbers of the first device",
        "adapters/modules/dropout.py",
        "return torch.cuda.default_generators[index]",
        "return torch.cuda.default_generators[0]",
        "dropout depends on the device",
    ),
    Mutant(
        "random state of one device is kept",
        "pipeline/forwards.py",
        "keeping_random_numbers(self.world.stage_devices.values())",
        "keeping_random_numbers([self.world.device])",
        "a step changes the random numbers of the script around it",
    ),
)


def copy_of(root: Path, folder: Path) -> Path:
    """A copy of what the tests need of a checkout."""
    folder.mkdir()
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def first_failure(folder: Path) -> str | None:
    """Run the tests in a copy until one fails; its name, or None if all pass."""
    tests = [f"tests/emulated_cuda/{name}" for name in TESTS if (folder / "tests/emulated_cuda" / name).exists()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-k", KEPT, "-p", "no:cacheprovider", *tests]
    settings = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Without a compiler the tests would be skipped, and every mutant would survive.
    settings |= {"HF_GPIPE_CI": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=os.environ | settings, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return f"the tests had not ended after {LIMIT} s"
    if done.returncode == 0:
        return None
    named = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return named[0].split(" - ")[0].rpartition("/")[2] if named else (done.stdout + done.stderr)[-500:]


def tried(root: Path, mutant: Mutant) -> str | None:
    """The test that notices a mutant; None: it survives."""
    with tempfile.TemporaryDirectory() as folder:
        copied = copy_of(root, Path(folder) / "copy")
        path = copied / "hf_gpipe" / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        compile(path.read_text(), str(path), "exec")
        return first_failure(copied)


def misfits(root: Path, mutants: Sequence[Mutant]) -> list[str]:
    """A reason why mutants cannot be made."""
    counts = [(mutant, (root / "hf_gpipe" / mutant.file).read_text().count(mutant.old)) for mutant in mutants]
    return [f"{mutant.name}: {mutant.file} has {mutant.old!r} {count} times" for mutant, count in counts if count != 1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="words, of which a mutant's name has one")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout (default: this one)")
    parser.add_argument("--at-once", type=int, default=2, help="how many are tried at a time (default: 2)")
    given = parser.parse_args(arguments)
    mutants = [mutant for mutant in MUTANTS if any(word in mutant.name for word in given.only)]
    if given.list:
        print(*(f"{mutant.name} ({mutant.file}): {mutant.why}" for mutant in mutants), sep="\n")
        return 0
    if wrong := misfits(given.root, mutants):
        print("error: mend the mutants:", *wrong, sep="\n  ", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        if failure := first_failure(copy_of(given.root, Path(folder) / "copy")):
            print(f"error: without a mutant a test fails: {failure}", file=sys.stderr)
            return 2
    start, num_killed = time.monotonic(), 0
    with ThreadPoolExecutor(given.at_once) as pool:
        failures = pool.map(lambda mutant: tried(given.root, mutant), mutants)
        for mutant, failure in zip(mutants, failures, strict=True):
            num_killed += failure is not None
            print(f"{'SURVIVED' if failure is None else 'killed':9} {mutant.name:50} {failure or ''}", flush=True)
    print(f"{num_killed} of {len(mutants)} mutants were noticed, in {time.monotonic() - start:.0f} s")
    return 0 if num_killed == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
