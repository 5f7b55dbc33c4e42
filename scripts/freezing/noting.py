"""A plugin of pytest that notes what tests raise, exit with and construct: `pytest -p scripts.freezing.noting`.

It notes each error of the package that a test expects, each exit code of a command other than 0 with its messages, the
arguments of trainers that differ from their defaults, and the configurations of pipelines. HF_GPIPE_NOTES names the
folder of the notes, a file for each process, and HF_GPIPE_WANTED a file with the names of the tests to run, if not all
shall run. Tests that draw their examples are left out.
"""

from __future__ import annotations

import json
import multiprocessing.process
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, fields
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

_COMMANDS = (
    "__main__",
    "train",
    *(f"commands.{name}" for name in ("train", "plan", "generate", "merge", "check", "launch")),
)
_TOLD = ("error: ", "stopped by ")
_REMOTE = re.compile(r"^(hf_gpipe\.[\w.]+Error): (.*)$", re.MULTILINE)


class _State:
    """The state that the hooks share."""

    test = ""
    depth = 0


def _note(kind: str, text: str) -> None:
    """Note a line of the test that runs."""
    if not _State.test:
        return
    path = Path(os.environ["HF_GPIPE_NOTES"]) / f"{os.getpid()}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps([_State.test, kind, text]) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to note, in each process of the tests."""
    is_controller = bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")
    if is_controller or "HF_GPIPE_NOTES" not in os.environ or hasattr(pytest.raises, "is_noting"):
        return
    _watch_raises()
    _watch_processes()
    _watch_commands()
    _watch_pipelines()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are not wanted."""
    if (path := os.environ.get("HF_GPIPE_WANTED")) is not None:
        wanted = set(Path(path).read_text(encoding="utf-8").splitlines())
        left_out = [item for item in items if name_of(item.nodeid) not in wanted]
        items[:] = [item for item in items if name_of(item.nodeid) in wanted]
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Notes are of this test."""
    is_drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    _State.test = "" if is_drawn else name_of(item.nodeid)
    try:
        return (yield)
    finally:
        _State.test = ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Note the messages of commands that ran in processes of their own."""
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    for path in sorted(folder.rglob("*.err")) if folder is not None else ():
        try:
            _note_told(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue


def name_of(nodeid: str) -> str:
    """The name of a test without its file, which may move."""
    return nodeid.partition("::")[2].replace("\n", " ")


def _note_told(text: str) -> None:
    for line in text.splitlines():
        if line.startswith(_TOLD):
            _note("told", line)


def _watch_raises() -> None:
    """Note errors of the package that tests expect."""
    raises = pytest.raises

    class Noting:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __enter__(self) -> Any:
            return self._inner.__enter__()

        def __exit__(self, kind: Any, error: Any, traceback: Any) -> Any:
            result = self._inner.__exit__(kind, error, traceback)
            if result and error is not None:
                if type(error).__module__.startswith("hf_gpipe"):
                    _note("raised", f"{type(error).__name__}: {error}")
                for name, text in _REMOTE.findall(str(error)):
                    _note("raised", f"{name.rpartition('.')[2]} in a process: {text}")
            return result

    @wraps(raises)
    def noting(*args: Any, **kwargs: Any) -> Any:
        made = raises(*args, **kwargs)
        return Noting(made) if hasattr(made, "__enter__") else made

    noting.is_noting = True  # type: ignore[attr-defined]
    pytest.raises = noting


def _watch_processes() -> None:
    """Note exit codes of processes."""
    run, join = subprocess.run, multiprocessing.process.BaseProcess.join

    @wraps(run)
    def noting_run(*args: Any, **kwargs: Any) -> Any:
        done = run(*args, **kwargs)
        if done.returncode > 0 and "hf_gpipe" in str(done.args):
            _note("exit code", str(done.returncode))
            if done.stderr:
                _note_told(done.stderr if isinstance(done.stderr, str) else done.stderr.decode(errors="replace"))
        return done

    @wraps(join)
    def noting_join(process: Any, timeout: float | None = None) -> None:
        join(process, timeout)
        if process.exitcode is not None and process.exitcode > 0:
            _note("exit code", str(process.exitcode))

    subprocess.run = noting_run
    multiprocessing.process.BaseProcess.join = noting_join  # type: ignore[method-assign]


class _Tee:
    """A stream that also keeps what is written."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.text: list[str] = []

    def write(self, text: str) -> int:
        self.text.append(text)
        written: int = self._stream.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _watch_commands() -> None:
    """Note exit codes and messages of commands that tests call."""
    for name in _COMMANDS:
        module = import_module(f"hf_gpipe.{name}")
        module.main = _noting_main(module.main)  # type: ignore[attr-defined]


def _noting_main(main: Callable[..., int]) -> Callable[..., int]:
    @wraps(main)
    def noting(argv: Sequence[str] | None = None) -> int:
        if _State.depth:
            return main(argv)
        stream, tee = sys.stderr, _Tee(sys.stderr)
        sys.stderr = tee  # type: ignore[assignment]
        _State.depth += 1
        try:
            code = main(argv)
        finally:
            sys.stderr = stream
            _State.depth -= 1
        if code:
            _note("exit code", str(code))
            _note_told("".join(tee.text))
        return code

    return noting


def _watch_pipelines() -> None:
    """Note arguments and configurations."""
    import hf_gpipe
    from hf_gpipe.pipeline import Pipeline
    from hf_gpipe.settings.pipeline import PipelineConfig
    from hf_gpipe.settings.section import keys_of

    for name in hf_gpipe.__all__:
        own = getattr(hf_gpipe, name)
        if isinstance(own, type) and issubclass(own, hf_gpipe.PipelineTrainingArguments):
            own.__init__ = _noting_init(own, own.__init__)  # type: ignore[misc]
    make, defaults = Pipeline._make, {key: value.default for key, value in keys_of(PipelineConfig).items()}

    @wraps(make)
    def noting_make(pipe: Any, *args: Any, **kwargs: Any) -> None:
        make(pipe, *args, **kwargs)
        # What the planner chooses for this machine depends on it.
        if pipe.given.is_decided:
            own = {key: value for key, value in pipe.config.of_plan.items() if value != defaults.get(key)}
            _note("pipeline", json.dumps(own, sort_keys=True, default=str))

    Pipeline._make = noting_make  # type: ignore[method-assign]


def _noting_init(cls: type, init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def noting(arguments: Any, *args: Any, **kwargs: Any) -> None:
        init(arguments, *args, **kwargs)
        if type(arguments) is cls:
            every = [one for one in fields(cls) if one.init]  # type: ignore[arg-type]  # they are dataclasses
            values = {one.name: (getattr(arguments, one.name, None), _default_of(one)) for one in every}
            own = {name: repr(value) for name, (value, default) in values.items() if value != default}
            _note("arguments", f"{cls.__name__} {json.dumps(own, sort_keys=True)}")

    return noting


def _default_of(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
