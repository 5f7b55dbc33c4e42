"""Report failures: one message per job, from the process that failed first.

A process that fails only because another one failed prints nothing. Each process notes its failure in the file that
torch's launcher names in TORCHELASTIC_ERROR_FILE, from which that launcher, or ours, picks the first.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from hf_gpipe import strict_json
from hf_gpipe.errors import EXIT_FAILURE, EXIT_USER_ERROR, HfGpipeError, PeerError, StageError, UserError
from hf_gpipe.job.job import LAUNCHER_PID, Job
from hf_gpipe.job.store import count_in_store
from hf_gpipe.text import RED, coloured

#: How long a process on another machine has to tell its own failure, which is the cause of this one's.
_CAUSE_SECONDS = 3.0
#: torchrun's agent sets it for its processes, and tells which of them was killed.
_AGENT_VARIABLE = "TORCHELASTIC_RUN_ID"
#: How long the store may take to answer: a stopped process that has it never does, and no time limit of torch's holds.
_STORE_SECONDS = 5.0
_LOST = "no failure of another process is known here: "
_LOST_MACHINE = f"{_LOST}look at the other machines, one of which may be lost, or its network"
_LOST_PROCESS = f"{_LOST}one was killed, as the system does when memory runs out, or has ended without a word"

_TIMED_OUT = re.compile(
    r"\[\S*gloo\S*\] Timed out waiting (?P<gloo_ms>\d+)ms for (?P<gloo>\w+) operation to complete"
    r"|(\[Rank \d+\] )?Watchdog caught collective operation timeout: WorkNCCL\(.*?OpType=(?P<nccl>\w+)"
    r".*?Timeout\(ms\)=(?P<nccl_ms>\d+)\) ran for \d+ milliseconds before timing out\.?"
    r"|wait timeout after (?P<store_ms>\d+)ms, keys: \S+"
    # Another thread's message between the same two processes was the one that gloo had waited for.
    r"|(\[\S*gloo\S*\] )?(?P<other_thread>Application timeout caused pair closure)"
)
_LOST_CONNECTION = "lost the connection to another process"
_WAITED = "seconds in vain for"
_CLOSED = re.compile(
    r"(RuntimeError: )?\[\S*gloo/\S*\] (\w+ (error )?\S+ )?(Connection (closed|reset) by peer|Broken pipe).*"
)


#: Held by the thread that tells why this process fails; another thread may find the same cause meanwhile.
telling = threading.RLock()

#: `Failure` has a field of the name of its module.
_now = time.time


@dataclass(frozen=True)
class Failure:
    """Why a process failed.

    Attributes:
        message: one line.
        exit_code: 2 if the user can correct it, else 1.
        is_consequence: whether it failed because another process did.
        time: seconds since the epoch, to tell which process failed first.
        traceback: Python's; empty where the user can correct the failure, or a thread has found it.
        is_time_limit: whether it waited too long for another process.
        is_told: whether a process has printed it, for want of a launcher that does.
    """

    message: str
    exit_code: int = EXIT_FAILURE
    is_consequence: bool = False
    time: float = field(default_factory=_now)
    traceback: str = ""
    is_time_limit: bool = False
    is_told: bool = False


def describe(error: BaseException) -> Failure:
    """Describe an exception as a failure; its message is one line and names the process, unless it is a UserError."""
    is_user_error = isinstance(error, UserError)
    text = _CLOSED.sub(_LOST_CONNECTION, " ".join(str(error).split()))
    if isinstance(error, dist.DistNetworkError):
        text = f"{_LOST_CONNECTION}, which has the store ({text})"
    work = Job.current().work
    if isinstance(error, StageError):
        text += f" ({work})" if work else ""
    elif not isinstance(error, HfGpipeError):
        text = f"process {_rank()}{', ' * bool(work)}{work}: {type(error).__name__}: {text}"
    if not is_user_error:
        text = f"{of_machine()}{text}"
    text = _TIMED_OUT.sub(_waited, text)
    return Failure(
        message=text,
        exit_code=EXIT_USER_ERROR if is_user_error else EXIT_FAILURE,
        is_consequence=_is_consequence(error),
        traceback="" if is_user_error else "".join(traceback.format_exception(error)),
        is_time_limit=_WAITED in text,
    )


def note(error: BaseException) -> None:
    """Write a failure to the error file at once, before a longer search for its cause.

    So it has an earlier time than the failures of processes that wait for this one. `tell` later replaces the message.
    """
    failure = Job.current().failure = describe(error)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        _write_error_file(Path(path), failure)


def tell_noted() -> None:
    """Tell what `note` has noted, in a process that must end during the search for its cause."""
    failure = Job.current().failure
    if failure is not None and not failure.is_consequence:
        tell(failure)


def report(error: BaseException, traceback_file: Path | None = None) -> int:
    """Print why this process fails, once per job, and return its exit code.

    Args:
        traceback_file: where to put the traceback of a fault; its path is part of the message.
    """
    return tell(describe(error), traceback_file)


def tell(failure: Failure, traceback_file: Path | None = None, *, store_answers: bool = True) -> int:
    """Print why this process fails, once per job, and return its exit code.

    Args:
        traceback_file: as for `report`.
        store_answers: if not, it is what all processes have found, and no launcher that is stopped tells it: one
            process of each machine does.
    """
    with telling:
        Job.current().is_failing = True
        failure = replace(failure, is_told=not store_answers)
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            earlier = read_error_file(Path(path))
            _write_error_file(Path(path), replace(failure, time=earlier.time) if earlier else failure)
        if not store_answers:
            if _speaks_for_machine():
                show(failure, traceback_file)
        elif LAUNCHER_PID in os.environ:
            pass  # it tells the failure
        elif not failure.is_consequence:
            if _is_first():
                show(failure, traceback_file)
        elif _has_other_machines() or (Job.current().store is not None and _AGENT_VARIABLE not in os.environ):
            # The cause may be a machine that is gone, or a process that was killed and has no launcher that tells it.
            time.sleep(_CAUSE_SECONDS)
            if _is_first():
                lost = _LOST_MACHINE if _has_other_machines() else _LOST_PROCESS
                show(replace(failure, message=f"{failure.message} ({lost})"), traceback_file)
        return failure.exit_code


def end(failure: Failure, *, store_answers: bool = True) -> NoReturn:
    """End this process from a thread, which cannot raise in the main one, and tell why unless that is told already."""
    with contextlib.suppress(Exception), telling:
        if not Job.current().is_failing:
            tell(failure, store_answers=store_answers)
    os._exit(failure.exit_code)


def show(failure: Failure, traceback_file: Path | None = None) -> None:
    """Print a failure as one line on stderr."""
    where = ""
    if failure.traceback and traceback_file is not None:
        with contextlib.suppress(OSError):
            traceback_file.write_text(failure.traceback)
            where = f" (the traceback is in {traceback_file})"
    print(f"{coloured('error:', RED, sys.stderr)} {failure.message}{where}", file=sys.stderr, flush=True)


def read_error_file(path: Path) -> Failure | None:
    """The failure in an error file; None if there is none written by this project."""
    try:
        noted = strict_json.read(path, dict[str, Any]).get("hf_gpipe")
        return Failure(**noted) if noted is not None else None
    except (UserError, TypeError):
        return None


def _write_error_file(path: Path, failure: Failure) -> None:
    # `message` is the form that torch's launcher reads and shows. It compares whole seconds, and must not find a
    # consequence before its cause.
    timestamp = int(failure.time) + failure.is_consequence
    # Of processes that only lost their connection torchrun would print a traceback each, beside that of the cause.
    stack = failure.message if failure.is_consequence else failure.traceback or failure.message
    extra = {"py_callstack": stack, "timestamp": str(timestamp)}
    content = {"message": {"message": failure.message, "extraInfo": extra}, "hf_gpipe": asdict(failure)}
    temporary = path.with_suffix(".tmp")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(content))
        temporary.replace(path)


def _waited(match: re.Match[str]) -> str:
    if match["other_thread"]:
        return waited(Job.current().limit.total_seconds())
    operation = (match["gloo"] or match["nccl"] or "connect").lower()
    what = {"recv": "a message from", "send": "a message to be taken by", "connect": "a connection to"}
    milliseconds = match["gloo_ms"] or match["nccl_ms"] or match["store_ms"]
    return waited(int(milliseconds) / 1000, what.get(operation, f"{operation} with"))


def waited(seconds: float, what: str = "a message from") -> str:
    """Text that says that a process gave up waiting for another one."""
    return f"waited {seconds:g} {_WAITED} {what} another process"


def _is_consequence(error: BaseException) -> bool:
    """Whether an exception or its cause is a lost connection to another process, or a message that one failed."""
    cause: BaseException | None = error
    while cause is not None:
        # The first process that waits for too long is where a hanging run is noticed: it is no consequence.
        if isinstance(cause, RuntimeError) and ("Timed out" in str(cause) or _TIMED_OUT.search(str(cause))):
            return False
        if isinstance(cause, PeerError | dist.DistError):
            return True
        # gloo raises plain RuntimeErrors, each with the line of gloo that it comes from.
        if isinstance(cause, RuntimeError) and "gloo/" in str(cause):
            return True
        cause = cause.__cause__
    return False


def _is_first() -> bool:
    """Whether no other process of a job that torchrun, accelerate or srun started has reported a failure before."""
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if has_agent or Job.current().store is not None:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            return count_in_store(host, port, f"hf_gpipe/failures/{Job.current().start}", _STORE_SECONDS) == 1
        except TimeoutError:
            return _speaks_for_machine()  # every process of this machine comes to the same
        except OSError:
            if not has_agent:
                return _rank() == 0  # process 0, which held the store, has told its own failure and is gone
    return os.environ.get("LOCAL_RANK", "0") == "0" or dist.is_initialized()


def _speaks_for_machine() -> bool:
    """Whether this process tells for all of its machine that the store is silent: the first that does not have it."""
    local_rank = os.environ.get("LOCAL_RANK", "0")
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_with_process_0 = os.environ.get("RANK", "0") == local_rank
    return local_rank == ("1" if is_with_process_0 and not has_agent else "0")


def of_machine() -> str:
    """The beginning of a message in a job of several machines: the name of this machine."""
    return f"machine {socket.gethostname()}: " if _has_other_machines() else ""


def _has_other_machines() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE", "1") != os.environ.get("WORLD_SIZE", "1")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
