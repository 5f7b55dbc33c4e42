"""The name of a model or of data: a path of this machine, or an id on the Hub."""

from __future__ import annotations

import os

from hf_gpipe.errors import UserError

#: Ends of the names of files. No id on the Hub is expected to have one.
_ENDS = (
    *(".arrow", ".bin", ".csv", ".gguf", ".gz", ".json", ".jsonl", ".parquet", ".pt", ".safetensors", ".tsv", ".txt"),
    *(".yaml", ".yml", ".zip"),
)


def is_here(name: str | os.PathLike[str]) -> bool:
    """Whether this machine has a directory or file of the name, which is then no id on the Hub.

    Raises UserError where the name can only be a path, and nothing is there: the Hub is not asked for it.
    """
    text = os.fspath(name)
    if os.path.exists(text):
        return True
    is_file = text.lower().endswith(_ENDS)
    if is_file or not isinstance(name, str) or text.startswith((".", "/", "~")) or text.count("/") > 1:
        what = "file" if is_file else "directory"
        raise UserError(f"there is no {what} {text} (looked in {os.getcwd()}); correct the path, or give a Hub id")
    return False
