"""Says what the toolkit does, and compares it with what it did: the proof that a change of the code changes nothing.

The results are in tests/frozen, a file for each part. `check` computes them anew and prints every difference; its exit
code is 1 if there is one. `write` replaces the results. A line of `show` is an entry with its text.

    python scripts/freeze.py check                              about twenty minutes on two cores
    python scripts/freeze.py check tables --only "1f1b stages=4"
    python scripts/freeze.py write numbers
    python scripts/freeze.py show plans --only quickstart
    python scripts/freeze.py price OTHER_CHECKOUT               what the planner of that checkout says of today's plans

Each part (tables, numbers, checkpoints, plans, settings, rows, faults, tests) is a module of scripts/freezing that says
what is frozen, which of its numbers may be off, and by how much. Processors add up in different orders; ENVIRONMENT
makes that as alike as it can be, and what is left has a tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("tables", "numbers", "checkpoints", "plans", "settings", "rows", "faults", "tests")
#: A machine computes with the instructions that every x86 processor of ten years has, in one thread, and asks no hub.
ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "TZ": "UTC",
    "COLUMNS": "120",
}


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.command == "price":
        from scripts.freezing.price import compare

        return compare(Path(options.checkout), options.only, options.slower)
    if options.command == "compute":
        Path(options.into).write_text(json.dumps(_computed(options)))
        return 0
    _check_versions()
    parts = options.parts or PARTS
    if options.command == "write" and options.only:
        raise SystemExit("write replaces all results of a part: leave --only out")
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-freeze-") as folder:
        num_differences = sum(_part(part, options, Path(folder)) for part in parts)
    if options.command == "check":
        print(f"{num_differences} differ" if num_differences else "nothing differs")
    return int(bool(num_differences))


def _check_versions() -> None:
    """End the program where the libraries are of other versions than the results. Raises SystemExit."""
    wanted = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    for name in ("torch", "transformers", "peft", "tokenizers"):
        if (found := version(name).partition("+")[0]) != wanted[name].partition("+")[0]:
            raise SystemExit(f"{name} is {found}, and tests/frozen is of {wanted[name]}: install constraints.txt")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("check", "write", "show", "compute"):
        own = commands.add_parser(command)
        own.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; none: all")
        own.add_argument("--only", default="", help="entries whose name contains this")
        own.add_argument("--processes", type=int, default=2, help="that compute at once")
        own.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
        own.add_argument("--into", help=argparse.SUPPRESS)
        own.add_argument("--new", action="store_true", help=argparse.SUPPRESS)
    price = commands.add_parser("price")
    price.add_argument("checkout", help="folder of another checkout, whose planner prices the plans of this one")
    price.add_argument("--only", default="", help="plans whose name contains this")
    price.add_argument("--slower", type=float, default=0.01, help="the share by which a plan may be slower")
    return parser


def _part(part: str, options: argparse.Namespace, folder: Path) -> int:
    """Do the command for a part; returns the number of differences."""
    from scripts.freezing import results

    if part not in PARTS:
        raise SystemExit(f"there is no part {part!r}: use {', '.join(PARTS)}")
    begin, is_new = time.monotonic(), options.command == "write"
    if is_new and part == "checkpoints":
        _run("from scripts.freezing import checkpoints; checkpoints.prepare()")
    now = compute(part, options, folder, is_new=is_new)
    spent = f"{part}: {len(now)} entries in {time.monotonic() - begin:.0f} s"
    module = import_module(f"scripts.freezing.{part}")
    path = results.FOLDER / module.FILE
    if options.command == "show":
        for name, text in sorted(now.items()):
            print(f"{name}\n{text}")
        return 0
    if options.command == "write":
        results.write(path, now)
        print(f"{spent}, {path.stat().st_size} bytes in {path.relative_to(ROOT)}", flush=True)
        return 0
    before = {name: text for name, text in results.read(path).items() if options.only in name}
    found = list(results.differences(before, now, module.tolerance_of))
    for text in found:
        print(f"{part}: {text}")
    print(f"{spent}, {len(found)} differ", flush=True)
    return len(found)


def compute(part: str, options: argparse.Namespace, folder: Path, *, is_new: bool) -> dict[str, str]:
    """The entries of a part, from processes that each compute a share of them.

    Raises:
        SystemExit: a process failed.
    """

    def share(number: int) -> dict[str, str]:
        into = folder / f"{part}-{number}.json"
        words = ["compute", part, "--only", options.only, "--into", str(into), *(["--new"] if is_new else [])]
        command = [sys.executable, str(Path(__file__).resolve()), *words, "--share", f"{number}/{options.processes}"]
        done = subprocess.run(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"{part}: a process ended with exit code {done.returncode}\n{done.stderr[-3000:]}")
        entries: dict[str, str] = json.loads(into.read_text())
        return entries

    with ThreadPoolExecutor(options.processes) as pool:
        shares = list(pool.map(share, range(options.processes)))
    return {name: text for entries in shares for name, text in entries.items()}


def _run(program: str) -> None:
    """Run a program in the environment of results."""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)


def environment(checkout: Path = ROOT) -> dict[str, str]:
    """The variables of a process that computes with the package of a checkout."""
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(checkout)}


def _computed(options: argparse.Namespace) -> Mapping[str, str]:
    """The share of a part that this process computes."""
    module: Any = import_module(f"scripts.freezing.{options.parts[0]}")
    number, count = map(int, options.share.split("/"))
    entries: Mapping[str, str] = {}
    if getattr(module, "IS_WHOLE", False):
        if number == 0:
            entries = module.all_entries(options.only, is_new=options.new)
        return entries
    names = [name for name in module.names() if options.only in name]
    # In turn, since entries that take long are neighbours.
    entries = module.entries(names[number::count])
    return entries


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
