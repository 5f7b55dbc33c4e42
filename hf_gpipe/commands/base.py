"""The parts that the commands share: a parser of options, and one line for an error that the user can correct."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from hf_gpipe.errors import EXIT_USER_ERROR, UserError, one_line
from hf_gpipe.text import RED, coloured


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and exit code 2, as every other error of a command."""

    def __init__(self, description: str | None, name: str | None = None) -> None:
        """`name` is that of a command of the package; None: the program is a script."""
        prog, formatter = f"hf-gpipe {name}" if name else None, argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, formatter_class=formatter)

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        raise UserError(f"{message}; {self.prog} --help lists the options")


def run_with_options(argv: Sequence[str] | None, parser: Parser, work: Callable[[argparse.Namespace], int]) -> int:
    """Run a command with the options of its arguments, or print its help where there are none; returns its exit code.

    Args:
        argv: the arguments; None: the program's.
        parser: of the arguments.
        work: returns the exit code.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if args:
        return run_command(lambda: work(parser.parse_intermixed_args(args)))
    parser.print_help()
    return EXIT_USER_ERROR


@contextmanager
def loading() -> Iterator[None]:
    """Import what a command needs in this context: a process starts in two thirds of the time.

    The garbage collector, which would look at the million objects of torch and transformers again and again, is off
    while they are made, and leaves them out from then on, at the end of the process too. Where transformers is imported
    already, the objects are those of another program, and nothing changes.
    """
    if "transformers" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if "triton" in sys.modules:
            # Its bindings would print hundreds of lines at the end about objects that were not collected.
            atexit.register(gc.unfreeze)


def run_command(work: Callable[[], int]) -> int:
    """Run a command without warnings of the libraries; returns its exit code, 2 for an error the user can correct."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore")
    try:
        return flushed(work)
    except UserError as error:
        return fail(error)


def flushed(work: Callable[[], int]) -> int:
    """Do work that prints, and see that all of it is written; returns what it returns, or 0 if nobody reads it."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # A reader such as head has seen enough. What is still buffered must not fail at the interpreter's end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def fail(error: UserError) -> int:
    """Print an error in one line; returns the exit code."""
    print(f"{coloured('error:', RED, sys.stderr)} {one_line(str(error))}", file=sys.stderr)
    return EXIT_USER_ERROR
