"""Runs a reader in a process of its own, with limits, and notes what it does that no reader may do."""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_gpipe.errors import NonFiniteError, UserError

READ, REFUSED = "read", "refused"
#: Of the processor's time, which a busy machine does not change; and until a process that sleeps is ended.
CPU_SECONDS, SECONDS = 10, 60
GROWTH_BYTES = 10**9
#: Address space has more than memory: libraries, and files that are mapped.
_SPARE_BYTES = 3 * 10**9

_WRITES = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
_RUNS = {"os.system", "os.exec", "os.posix_spawn", "pty.spawn", "socket.connect", "pickle.find_class"}
#: What the product itself and its libraries start (matplotlib asks for the machine's fonts), and what libraries open.
_OWN_PROGRAMS = ("train_sentencepiece.py", "fc-list")
_ANYBODYS = ("/dev/", "/proc/")


def run(read: Callable[[], None], folder: Path) -> str:
    """The outcome of a reader: READ, REFUSED, or what was wrong, in one line.

    Args:
        read: called in a forked process.
        folder: where alone it may write; what it prints goes there.
    """
    output = folder.with_name(f"{folder.name}.out")
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _in_child(read, folder, output)
    while True:
        ended, status, used = os.wait4(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() - start > SECONDS:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"it had not ended after {SECONDS} s"
        time.sleep(0.002)
    said = output.read_text(errors="replace") if output.exists() else ""
    errors = " ".join(line for line in said.splitlines() if line.startswith("error: "))
    last = f"{errors[:500]} {' '.join(said.split())[-300:]}".strip()
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return f"ended by {name}" + (f": over {CPU_SECONDS} s of the processor" if name == "SIGXCPU" else f": {last}")
    grown = used.ru_maxrss * 1024 - _memory_of_this_process()
    if grown > GROWTH_BYTES:
        return f"it took {grown / 1e9:.1f} GB"
    code = os.WEXITSTATUS(status)
    if code == 2 and said.count("error: ") > 2:
        return f"more than one error: {last}"
    return {0: READ, 2: REFUSED}.get(code, f"exit code {code}: {last}")


def _memory_of_this_process() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _in_child(read: Callable[[], None], folder: Path, output: Path) -> None:
    code = 3
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, errors="backslashreplace", closefd=False)
        temporary = folder.with_name(f"{folder.name}.tmp")
        temporary.mkdir()
        tempfile.tempdir = os.environ["MPLCONFIGDIR"] = str(temporary)
        os.chdir(folder)
        address = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (address + _SPARE_BYTES, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        told: list[str] = []
        sys.addaudithook(_watch((f"{folder}/", f"{temporary}/", *_ANYBODYS), told))
        try:
            read()
            code = 0
        except UserError as error:
            print(f"error: {error}")
            code = 2
        except NonFiniteError:
            code = 2
        except BaseException:
            traceback.print_exc()
        said = output.read_text(errors="replace")
        if "Traceback (most recent call last)" in said and code != 3:
            code = 4
        if told:
            print("\n", *told, sep="\n")
            code = 5
        sys.stdout.flush()
    finally:
        os._exit(code)


def _watch(allowed: Sequence[str], told: list[str]) -> Callable[[str, tuple[Any, ...]], None]:
    """A hook for Python's audit events that notes what was run, or written outside of `allowed`."""

    def is_inside(path: Any) -> bool:
        if isinstance(path, int):
            return True
        full = os.path.realpath(os.fsdecode(path)) if path is not None else ""
        return f"{full}/".startswith(tuple(allowed))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if flags is not None and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and not is_inside(path):
                told.append(f"it opened {path!r} to write")
        elif event in _WRITES:
            paths = [argument for argument in arguments if isinstance(argument, str | bytes | os.PathLike)]
            # Names are relative to an open directory where a descriptor is given.
            if -1 not in arguments and any(isinstance(argument, int) and argument > 2 for argument in arguments):
                return
            for target in paths:
                # Of a link itself, the folder that has it counts.
                if not (is_inside(target) or is_inside(os.path.dirname(os.fsdecode(target)) or ".")):
                    told.append(f"{event} of {target!r}")
        elif event in _RUNS:
            told.append(f"it ran {event} {arguments!r}"[:300])
        elif event == "subprocess.Popen":
            if not any(str(word).endswith(_OWN_PROGRAMS) for word in arguments[1]):
                told.append(f"it started {arguments[1]!r}"[:300])
        elif event == "import" and arguments[1] is not None and is_inside(arguments[1]):
            told.append(f"it imported {arguments[1]}")

    return hook
