"""hf-gpipe: the commands by their names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from platform import python_version

from hf_gpipe.errors import EXIT_USER_ERROR, UserError, nearest

#: The modules of `commands` that are commands, with what they do.
COMMANDS = {
    "train": "train the model of a recipe, evaluate it, and save it",
    "plan": "predict memory and time of a recipe, and whether it fits",
    "simulate": "time and draw a schedule's table, also torch's CSV, without a recipe",
    "generate": "generate with a checkpoint, for a text, a chat turn or lines of stdin",
    "merge": "merge peft adapters into the weights of their model",
    "check": "check on a tiny clone whether a model is exact in stages",
    "launch": "print the file that starts a recipe on several machines",
}
USAGE = "\n".join(
    [
        "usage: hf-gpipe COMMAND ...",
        "",
        "Exact pipeline-parallel training of transformers models. `python -m hf_gpipe` is the same.",
        "",
        *(f"  {name:<9} {text}" for name, text in COMMANDS.items()),
        "",
        "`hf-gpipe COMMAND --help` says more. Under torchrun a command is a module: torchrun ... -m hf_gpipe.train",
        "`hf-gpipe --version` prints the versions of hf_gpipe, torch, transformers and Python.",
    ]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names, with the others; returns its exit code."""
    name, *args = list(sys.argv[1:] if argv is None else argv) or [""]
    if name in COMMANDS:
        code: int = import_module(f"hf_gpipe.commands.{name}").main(args)
        return code
    if name in ("", "-h", "--help"):
        from hf_gpipe.commands.base import flushed

        return flushed(lambda: print(USAGE) or (0 if name else EXIT_USER_ERROR))
    if name == "--complete":
        from hf_gpipe.commands.completion import complete

        print("\n".join(complete(COMMANDS)))
        return 0
    if name == "--version":
        print(_versions())
        return 0
    from hf_gpipe.commands.base import fail

    names = ", ".join(COMMANDS)
    return fail(UserError(f"{name!r} is not a command; it must be one of {names}{nearest(name, COMMANDS)}"))


def _versions() -> str:
    """The versions that a report of a fault needs, without an import of what they are of."""
    versions = [f"hf_gpipe {import_module('hf_gpipe').__version__}"]
    for package in ("torch", "transformers"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"no {package}")
    return ", ".join([*versions, f"Python {python_version()}"])


if __name__ == "__main__":
    sys.exit(main())
