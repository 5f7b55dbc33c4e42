"""Which lines of hf_gpipe/ that mention a device the tests on emulated devices execute.

    python -m tests.emulated_cuda.covered [FOLDER OR FILE ...]     # default: this folder and the test of gpu_check

It needs coverage (`pip install coverage`). Only processes with the emulated devices are traced, and those that are
killed are not counted; nor is what runs in the threads of autograd, which Python cannot trace.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.emulated_cuda.__main__ import ROOT

TESTS = ("tests/emulated_cuda", "tests/scripts/test_gpu_check.py")
DEVICE = re.compile(r"cuda|nccl|(?<!per_)device|(^|_)stream|^Stream$|pin_memory|non_blocking", re.IGNORECASE)
CUDA = re.compile(r"cuda|nccl", re.IGNORECASE)
#: In these files a device is a row of a table of prices.
PRICES = ("plan.py", "planner/of_model.py", "planner/search/advice.py")
SETTINGS = """\
[run]
source = hf_gpipe
parallel = true
data_file = {folder}/data
core = ctrace
patch = _exit
disable_warnings = no-data-collected, module-not-imported, module-not-measured
"""


@dataclass(frozen=True)
class Line:
    """A statement that mentions a device, or that runs if one is CUDA.

    Attributes:
        first: its line.
        last: the last line, of a statement with a body that of its head.
        text: the first line.
    """

    first: int
    last: int
    text: str


def device_lines(path: Path) -> list[Line]:
    """The statements in functions of the file that mention a device, or that run if one is CUDA, in order.

    Annotations, texts, imports and the heads of functions are left out: they run in any process. So are files that do
    not import torch, and prices of devices (`PRICES`).
    """
    text = path.read_text()
    lines = text.splitlines()
    if "import torch" not in text:
        return []
    pattern = CUDA if path.relative_to(ROOT / "hf_gpipe").as_posix() in PRICES else DEVICE
    found = {}
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef):
            for one in _statements(function.body, pattern, is_cuda=False):
                body = getattr(one, "body", None)
                last = body[0].lineno - 1 if body else one.end_lineno or one.lineno
                found[one.lineno] = Line(one.lineno, max(last, one.lineno), lines[one.lineno - 1].strip())
    return [found[number] for number in sorted(found)]


def _statements(body: list[ast.stmt], pattern: re.Pattern[str], *, is_cuda: bool) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)):
            continue
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        if is_cuda or any(pattern.search(name) for name in _names(statement)):
            yield statement
        is_test = isinstance(statement, ast.If) and any(CUDA.search(name) for name in _names(statement))
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(
                getattr(statement, name, []), pattern, is_cuda=is_cuda or (is_test and name == "body")
            )
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body, pattern, is_cuda=is_cuda)


def _names(statement: ast.stmt) -> Iterator[str]:
    """Names and words in a statement, without those of its annotation, of texts, and of the statements inside it."""
    rest = [child for child in ast.iter_child_nodes(statement) if child is not getattr(statement, "annotation", None)]
    while rest:
        node = rest.pop()
        if isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            continue
        rest += ast.iter_child_nodes(node)
        for field in ("id", "attr", "arg", "value"):
            name = getattr(node, field, None)
            if isinstance(name, str) and " " not in name:
                yield name


def main(tests: list[str]) -> int:
    if importlib.util.find_spec("coverage") is None:
        print("error: this needs coverage: pip install coverage", file=sys.stderr)
        return 2
    import coverage

    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "coveragerc"
        settings.write_text(SETTINGS.format(folder=folder))
        paths = [str(Path(coverage.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"COVERAGE_PROCESS_START": str(settings), "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", *(tests or TESTS)], cwd=ROOT, env=environment)
        measured = coverage.Coverage(config_file=str(settings))
        measured.combine()
        executed = {
            Path(name): set(measured.get_data().lines(name) or ()) for name in measured.get_data().measured_files()
        }
    total = 0
    missing = []
    for path in sorted((ROOT / "hf_gpipe").rglob("*.py")):
        lines = device_lines(path)
        total += len(lines)
        for line in lines:
            if executed.get(path, set()).isdisjoint(range(line.first, line.last + 1)):
                missing.append(f"{path.relative_to(ROOT)}:{line.first}: {line.text}")
    print(*missing, f"{total - len(missing)} of {total} lines were executed", sep="\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
