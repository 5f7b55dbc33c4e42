"""The parts that the commands share: a parser of options, and one line for an error that the user can correct."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

from hf_gpipe.errors import EXIT_USER_ERROR, UserError, one_line


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and exit code 2, as every other error of a command."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        raise UserError(f"{message}; {self.prog} --help lists the options")


def run_command(work: Callable[[], int]) -> int:
    """Run a command without warnings of the libraries; returns its exit code, 2 for an error the user can correct."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore")
    try:
        return work()
    except UserError as error:
        return fail(error)


def fail(error: UserError) -> int:
    """Print an error in one line; returns the exit code."""
    print(f"error: {one_line(str(error))}", file=sys.stderr)
    return EXIT_USER_ERROR
