"""Reads a model's configuration from a Hub id or directory: nothing in it may take minutes, gigabytes or run code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from hf_gpipe import strict_json
from hf_gpipe.adapters.guards import check_sizes
from hf_gpipe.checkpoint.digests import check_model_files
from hf_gpipe.errors import CheckpointError, UserError
from hf_gpipe.libraries.transformers import CONFIG_NAME
from hf_gpipe.sources import is_here


def read_config(
    source: str | os.PathLike[str], *, trust_remote_code: bool = False, overrides: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """The configuration of a model.

    Args:
        source: a Hub id, or a directory, whose files are checked by their digests, if it has them.
        trust_remote_code: whether code beside the configuration may be run.
        overrides: fields to replace.

    Raises:
        CheckpointError: there is none, it is damaged, transformers cannot read it, or it has a number that is absurd.
    """
    directory = Path(source)
    check_model_files(directory)
    try:
        if is_here(source) and directory.is_file() and directory.name != CONFIG_NAME:
            raise UserError("it is a file; give the directory of a model in Hub format, or a Hub id")
        if (directory / CONFIG_NAME).exists():
            # Before transformers reads it: its constructors make a list as long as a number of layers says.
            strict_json.read(directory / CONFIG_NAME, dict[str, Any], allows_nan=True)
        fields, _ = PreTrainedConfig.get_config_dict(str(source))
        check_sizes({**fields, **(overrides or {})})
        return AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code, **(overrides or {}))
    except Exception as error:  # of a broken file, the library raises whatever its reading comes upon
        raise CheckpointError(f"cannot read a model's configuration at {str(source)!r}: {error}") from error
