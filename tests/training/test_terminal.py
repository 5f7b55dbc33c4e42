"""The log of a training on a terminal, and in a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_gpipe.commands.base import fail
from hf_gpipe.errors import UserError
from hf_gpipe.training.progress import ProgressBar

STEPS, EVERY = 20_000, 2_000


def train(folder: Path) -> list[str]:
    """Call the bar as a training does; returns the loss of each log."""
    bar, state, control = ProgressBar(), TrainerState(), TrainerControl()
    args, losses = TrainingArguments(output_dir=str(folder), disable_tqdm=True), []
    state.max_steps, state.is_world_process_zero = STEPS, True
    bar.on_train_begin(args, state, control)
    for step in range(EVERY, STEPS + 1, EVERY):
        state.global_step = step
        bar.on_step_end(args, state, control)
        losses.append(f"{9 - step / STEPS:.4f}")
        logs = {"loss": float(losses[-1]), "grad_norm": 1.5, "learning_rate": 3e-4, "tokens_per_second": 123456.0}
        logs |= {"bubble": 0.125, "seconds_left": 3723.0, "peak_memory_bytes": 7.1e10, "rewards/margins": 0.25}
        bar.on_log(args, state, control, logs=logs)
    bar.on_log(args, state, control, logs={"eval_loss": 2.0})
    bar.on_train_end(args, state, control)
    return losses


def screen(written: str, columns: int) -> list[str]:
    """The lines of a terminal of so many columns, with those that have scrolled away."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[A|[^\x1b]", written):
        if part == "\r":
            column = 0
        elif part in ("\n", "\x1b[A"):
            row += 1 if part == "\n" else -1
        else:
            if column == columns:
                row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines if line.strip()]


def on_terminal(folder: Path, columns: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """The losses of a training, and the lines of its terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    with open(theirs, "w", encoding="utf-8") as stderr, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stderr)
        os.set_blocking(ours, False)
        losses = train(folder)
        stderr.flush()
        written = b""
        while True:
            try:
                written += os.read(ours, 1 << 16)
            except BlockingIOError:
                break
    os.close(ours)
    return losses, screen(written.decode(), columns)


@pytest.mark.parametrize("columns", [80, 120])
def test_loss_step_and_time_left_can_be_read(columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns the metrics beside the bar were cut off, and each log's loss was written over by the next."""
    losses, lines = on_terminal(tmp_path, columns, monkeypatch)
    assert all(len(line) <= columns for line in lines)
    for number, loss in enumerate(losses, 1):
        (line,) = [line for line in lines if line.startswith(f"step {number * EVERY}/{STEPS}  loss {loss}")]
        rest = lines[lines.index(line) :][: 3 if columns == 80 else 2]
        for entry in ("grad_norm 1.500", "tokens_per_second 123,456", "memory 71.00 GB", "rewards/margins 0.25"):
            assert any(entry in one for one in rest), (entry, rest)
    assert any(line.endswith(f"step {STEPS}/{STEPS}  eval_loss 2.0000") for line in lines)
    bar = re.fullmatch(rf"step {STEPS}/{STEPS} \|(█+)\| \d\d:\d\d left, +\S+step/s, loss {losses[-1]}", lines[-1])
    assert bar is not None, lines[-1]
    assert len(bar[1]) > (10 if columns == 80 else 50)


def test_a_pipe_gets_one_line_for_each_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = train(tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == (
        f"step {EVERY}/{STEPS}  loss {losses[0]}  grad_norm 1.500  learning_rate 3.00e-04  tokens_per_second 123,456  "
        "bubble 12.5%  left 1:02:03  memory 71.00 GB  rewards/margins 0.25"
    )
    assert len(lines) == len(losses) + 1


@pytest.mark.parametrize(("is_terminal", "no_color"), [(True, ""), (True, "1"), (False, "")])
def test_an_error_is_red_on_a_terminal_alone(
    is_terminal: bool, no_color: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert fail(UserError("it is wrong")) == 2
    start = "\033[1;31merror:\033[0m" if is_terminal and not no_color else "error:"
    assert capsys.readouterr().err == f"{start} it is wrong\n"
