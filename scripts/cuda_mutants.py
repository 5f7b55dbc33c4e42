"""Break the code for CUDA one line at a time, and see that a test on the emulated devices fails each time.

    python scripts/cuda_mutants.py                        all mutants, two at a time; prints a table
    python scripts/cuda_mutants.py --only event sync      those that have one of these words
    python scripts/cuda_mutants.py --list                 what there is, and why it is wrong on a GPU
    python scripts/cuda_mutants.py --root FOLDER          with the package and the tests of another checkout

Each mutant is written into a copy of the package and the tests, and the tests of tests/emulated_cuda run there until
one fails. A mutant survives if none does. First the copies run unchanged, which must pass. The exit code is 1 if a
mutant survives, and 2 if one does not fit the package, or the tests fail without it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

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


class Mutant(NamedTuple):
    """A change of the package.

    Attributes:
        file: in hf_gpipe/.
        change: a text that the file has once, as `git diff --word-diff` shows changes: [-what goes-]{+what comes+}.
        why: what is wrong then on a GPU.
    """

    file: str
    change: str
    why: str

    @property
    def old(self) -> str:
        return re.sub(r"\[-(.*?)-\]", r"\1", re.sub(r"\{\+.*?\+\}", "", self.change, flags=re.DOTALL), flags=re.DOTALL)

    @property
    def new(self) -> str:
        return re.sub(r"\{\+(.*?)\+\}", r"\1", re.sub(r"\[-.*?-\]", "", self.change, flags=re.DOTALL), flags=re.DOTALL)

    def __str__(self) -> str:
        return f"{self.file}: {' '.join(self.change.split())}: {self.why}"


#: By the file: a change, and what is wrong then.
_CHANGES: dict[str, dict[str, str]] = {
    "runtime/channel.py": {
        "[-arriving-]{+leaving+}.record_event()": (
            "without peer access the last part of a strided copy runs on the arriving stream"
        ),
        "[-leaving, arriving-]{+arriving, leaving+} = self._streams": (
            "the copy's first part runs on a stream that has not waited for the tensor"
        ),
        "[-leaving-]{+arriving+}.wait_stream(torch.cuda.current_stream(self._source))": (
            "the copy's first part runs on a stream that has not waited for the tensor"
        ),
        "[-leaving.wait_stream(torch.cuda.current_stream(self._source))-]{+pass+}": (
            "a tensor is copied before it is computed"
        ),
        "leaving.wait_stream(torch.cuda.current_stream(self.[-_source-]{+_target+}))": (
            "a tensor is copied before it is computed"
        ),
        "[-        stream.wait_event(arrived)\n-]": "a copy is read before it has arrived",
        "[-stream-]{+self._streams[1]+}.wait_event(arrived)": "a copy is read before it has arrived",
        "[-tensor.record_stream(leaving)-]{+pass+}": "its memory is reused while it is copied",
        "[-copy.record_stream(stream)-]{+pass+}": "its memory is reused while it is read",
        "copy.record_stream([-stream-]{+self._streams[1]+})": "its memory is reused while it is read",
        "with torch.cuda.stream([-arriving), torch.cuda.stream(-]leaving):": (
            "the receiving device waits for a copy that it does not need yet"
        ),
        "with torch.cuda.stream(arriving)[-, torch.cuda.stream(leaving)-]:": (
            "the sending device computes nothing while it copies"
        ),
        "first[-.contiguous()-]": ("NCCL sends memory as it lies, and the receiver gets the values in another order"),
        "message.append((work, [-joined-]{+work+}))": "memory is reused while it is sent",
        "if not [-all(work.is_completed() for work, _ in self._sent[oldest])-]{+self._sent[oldest]+}:": (
            "memory is reused while it is sent"
        ),
        "            [-sent.wait()-]{+pass+}\n": "memory is reused while it is sent",
        "            [-work.wait()-]{+pass+}\n": "a message is read before it has arrived",
        "for work in works{+[:1]+}:": "a message is read before it has arrived",
    },
    "runtime/edges.py": {
        'if [-source != target and source.type == target.type == "cuda"-]{+False+}:': (
            "both devices compute nothing while they copy"
        ),
        "[-links = {link: communicator(world, link)-]{+shared = {frozenset(link[:2]): link for link in "
        "communicators(world.placement)}\n"
        "    made = {link: communicator(world, link) for link in shared.values()}\n"
        "    links = {link: made[shared[frozenset(link[:2])]]+} for link in "
        "communicators(world.placement)}": "a message waits for one in the other direction",
        "if [-world.rank in (sender, receiver)-]{+False+}:": "two processes wait for each other in the first step",
        "[-        torch.cuda.synchronize(device)\n-]": (
            "a communicator is set up while a message of another one is under way"
        ),
        "link.[-sender_device if is_sender else link.receiver_device-]{+receiver_device if is_sender "
        "else link.sender_device+}": "a communicator is on another device than its messages",
    },
    "schedule/messages.py": {
        "[-passed[receiver]-]{+max(0, passed[receiver] - 2)+})": "two devices wait for each other's messages",
    },
    "runtime/device_choice.py": {
        "[-torch.cuda.set_device(torch.device(devices[0]))-]{+pass+}": "every process takes memory on the first device",
    },
    "runtime/replicas.py": {
        "[-            bucket.work.wait()\n-]": "gradients are used before they are summed",
    },
    "runtime/ties.py": {
        "dist.reduce(piece, dst=tie.owners[0], group=tie.group{+, async_op=True+})": (
            "gradients are used before they are summed"
        ),
        "dist.broadcast(piece, src=tie.owners[0], group=tie.group{+, async_op=True+})": (
            "weights are read before they have arrived"
        ),
        '(rank, [-everyone[rank][stage][0]-]{+"cuda"+})': "processes number their communicators differently",
    },
    "runtime/shards.py": {
        "started(work)[-.wait()-]": "weights are read before they have arrived",
    },
    "runtime/host.py": {
        "[-    torch.cuda.current_stream(device).synchronize()\n-]": (
            "loss and norm are read early: the copy has not ended"
        ),
        "torch.cuda.current_stream([-device-]).synchronize()": (
            "loss and norm wait for the current device: the copy has not ended"
        ),
        "[-, pin_memory=True-]": "loss and norm go to memory that is not pinned: the host waits",
        "together = _joined([[-part.to(device, non_blocking=True-]{+torch.tensor(part.item(), "
        "device=device+}) for part in parts if part.is_cuda])": "each number is read by itself: the host waits",
    },
    "runtime/executor.py": {
        "                    result.outputs[planned.index] = message{+\n"
        '                    message["loss"].sum().item()+}\n': (
            "loss is read when its micro-batch ends: the host waits"
        ),
    },
    "runtime/gradient_norm.py": {
        "values = iter([-read([value for parts in (*losses, *squares) for value in "
        "parts]).tolist()-]{+[n for some in (losses, squares) for n in read([v for parts in some for v "
        "in parts]).tolist()]+})": "loss is read before the norm: the host waits",
        "if [-gradients[0].is_cuda-]{+False+}:": "norms are computed on the host: the host waits",
    },
    "runtime/micro_batch.py": {
        "tensor.contiguous()[-.pin_memory()-]": "micro-batches are not pinned: the host waits",
        "tensor.[-contiguous().-]pin_memory()": "a strided copy goes through memory that is not pinned",
        "tensor.to(device[-, non_blocking=True-])": "micro-batches are copied blocking: the host waits",
    },
    "runtime/cutting.py": {
        'batch = {name: tensor.[-cpu(-]{+to("cpu", non_blocking=True+}) for name': (
            "rows on a device are read early: the copy has not ended"
        ),
    },
    "job/wire.py": {
        'tensor.[-cpu(-]{+to("cpu", non_blocking=True+}).clone(': (
            "mini-batches on a device are read early: the copy has not ended"
        ),
    },
    "checkpoint/writer.py": {
        "[-torch.cuda.current_stream(device).synchronize()-]{+pass+}": (
            "copies for files are not waited for: the copy has not ended"
        ),
        "for device in [-{tensor.device for tensor in tensors.values() if "
        "tensor.is_cuda}-]{+[tensor.device for tensor in tensors.values() if tensor.is_cuda][:1]+}:": (
            "copies of one device are waited for: the copy has not ended"
        ),
        't.detach().contiguous().[-to("cpu", non_blocking=True-]{+cpu(+})': "the host waits for each tensor",
        "t.detach().[-contiguous().-]to(": "files are written from memory that is not in the order of the tensor",
    },
    "training/master_weights.py": {
        '"pin_memory": [-True-]{+False+}': "the host waits for each tensor",
        "else [-self._copies({name: part})[name]-]{+part.clone()+}": "the host waits for each tensor",
        'gradients = [-on_cpu(gradients)-]{+{name: value.to("cpu", non_blocking=True) for name, value in '
        "gradients.items()}+}": "offloaded gradients are read early: the copy has not ended",
        'gradients = [-on_cpu(gradients)-]{+{name: torch.empty_like(value, device="cpu").copy_(value) '
        "for name, value in gradients.items()}+}": "the host waits for each tensor",
    },
    "training/predicting.py": {
        'kept.detach().[-cpu(-]{+to("cpu", non_blocking=True+})': "predictions are read early: the copy has not ended",
    },
    "runtime/generation.py": {
        'tokens = self._generated(part_of(shared, own, num_parts)).[-cpu(-]{+to("cpu", non_blocking=True+})': (
            "generated tokens are read early: the copy has not ended"
        ),
    },
    "runtime/timing.py": {
        "[-        self.synchronize()\n-]": "an event has not been reached, and CUDA raises an error",
        "event.record(torch.cuda.current_stream([-device-]))": (
            "events of two devices have no time between them, and CUDA raises an error"
        ),
    },
    "adapters/modules/dropout.py": {
        "return torch.cuda.default_generators[[-index-]{+0+}]": "dropout depends on the device",
    },
    "pipeline/forwards.py": {
        "keeping_random_numbers([-self.world.stage_devices.values()-]{+[self.world.device]+})": (
            "a step changes the random numbers of the script around it"
        ),
    },
}
MUTANTS = [Mutant(file, *change) for file, changes in _CHANGES.items() for change in changes.items()]


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
    return [f"{mutant} stands there {count} times" for mutant, count in counts if count != 1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="words, of which a mutant's line in the list has one")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout (default: this one)")
    parser.add_argument("--at-once", type=int, default=2, help="how many are tried at a time (default: 2)")
    given = parser.parse_args(arguments)
    mutants = [mutant for mutant in MUTANTS if any(word in str(mutant) for word in given.only)]
    if given.list:
        print(*mutants, sep="\n")
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
            print(f"{'SURVIVED' if failure is None else 'killed':9} {mutant}: {failure or ''}", flush=True)
    print(f"{num_killed} of {len(mutants)} mutants were noticed, in {time.monotonic() - start:.0f} s")
    return 0 if num_killed == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
