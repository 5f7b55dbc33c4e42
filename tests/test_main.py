"""hf-gpipe and `python -m hf_gpipe`: the commands by their names."""

from __future__ import annotations

import contextlib
import gc
import os
import pty
import subprocess
import sys
import tomllib
import types
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

import hf_gpipe
from hf_gpipe.__main__ import COMMANDS, main
from hf_gpipe.commands.base import loading

ROOT = Path(__file__).parents[1]


def test_the_console_command_is_the_module_s() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["hf-gpipe"].partition(":")
    assert getattr(import_module(module), function) is main


def test_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert (main(["--help"]), main([])) == (0, 2)
    assert capsys.readouterr().out.count("  plan      predict") == 2
    assert main(["trian", "r.yaml"]) == 2
    assert (
        "'trian' is not a command; it must be one of train, plan, simulate, generate, merge, check, launch; did you "
        "mean 'train'?" in capsys.readouterr().err
    )
    finished = subprocess.run([sys.executable, "-m", "hf_gpipe"], capture_output=True, text=True, cwd=ROOT)
    assert (finished.returncode, finished.stderr) == (2, "")
    assert "usage: hf-gpipe COMMAND" in finished.stdout


def test_the_versions_are_one_line_that_needs_no_import_of_torch() -> None:
    """A report of a fault needed `pip list`, and a reader who knows which of its lines count."""
    program = "import sys; from hf_gpipe.__main__ import main; print(main(['--version']), 'torch' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    line, end = finished.stdout.splitlines()
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    assert line == f"hf_gpipe {hf_gpipe.__version__}, {packages}, Python {sys.version.split()[0]}"
    assert end == "0 False"


@pytest.mark.parametrize(
    ("line", "candidates"),
    [
        ("hf-gpipe tr", ["train "]),
        ("hf-gpipe merge --tr", ["--trust-remote-code "]),
        ("hf-gpipe train --help tr", ["training "]),
        ("hf-gpipe plan a.yaml --memory 1GiB pip", ["pipeline."]),
        ("hf-gpipe train a.yaml training.max_s", ["training.max_steps="]),
        # Files, which the shell itself offers.
        ("hf-gpipe train rec", []),
        ("hf-gpipe train a.yaml data.path=rec", []),
        ("hf-gpipe trian ", []),
    ],
)
def test_what_a_shell_offers(
    line: str, candidates: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_LINE", f"{line} more")
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert main(["--complete", "hf-gpipe", "", ""]) == 0
    assert capsys.readouterr().out.splitlines() == (candidates or [""])


def test_bash_completes_a_command_line() -> None:
    """By the line that docs/reference/commands.md gives."""
    page = (ROOT / "docs/reference/commands.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("complete ")]
    typed = "hf-gpipe pl\t--se\trecipes/quickst\t pipeline.num_st\t4"
    lines = [line.replace("hf-gpipe --complete", f"{sys.executable} -m hf_gpipe --complete")]
    lines += ['hf-gpipe() { echo "typed $*"; }', typed, "exit", ""]
    ours, theirs = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        start_new_session=True,
        cwd=ROOT,
    )
    os.close(theirs)
    os.write(ours, "\n".join(lines).encode())
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal that nobody has open
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert shell.wait() == 0
    assert "typed plan --search recipes/quickstart.yaml pipeline.num_stages=4\r\n" in shown.decode()


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_gets_its_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert f"usage: hf-gpipe {name} " in capsys.readouterr().out


def test_a_command_imports_without_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless another program that has imported all calls it."""
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    with loading():
        assert gc.isenabled()
    monkeypatch.delitem(sys.modules, "transformers")
    before = gc.get_freeze_count()
    with loading():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before


WRONG = [
    ["plan", "recipes/quickstart.yaml", "--device", "foo"],
    ["plan", "recipes/quickstart.yaml", "--device", "rtx3090", "--link", "foo"],
    ["plan", "recipes/causal/lora.yaml", "pipeline.stages=2", "--device", "rtx3090", "--search"],
    ["plan", "nowhere.yaml"],
    ["check", "./nowhere"],
    ["generate", "./nowhere"],
    ["merge", "nowhere", "--output", "out"],
]


def test_wrong_names_and_paths_are_told_before_anything_takes_seconds() -> None:
    """An unknown device was told after torch and transformers had been imported."""
    program = f"""
import sys
from hf_gpipe.__main__ import main
print([(main(words), "torch" in sys.modules) for words in {WRONG!r}])
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert finished.stdout.strip() == str([(2, False)] * len(WRONG))
    assert finished.stderr.count("error: ") == len(WRONG)
