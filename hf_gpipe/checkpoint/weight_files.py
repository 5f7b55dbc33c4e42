"""Which files of a Hub directory or id have a model's weights, as transformers' `from_pretrained` chooses them.

The configuration may name the file in its field `transformers_weights`. Otherwise it is the single file where both it
and an index are there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hf_gpipe import strict_json
from hf_gpipe.errors import CheckpointError
from hf_gpipe.libraries.huggingface_hub import Download
from hf_gpipe.libraries.transformers import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

#: The first letters of safetensors' types of whole numbers, and of types that weights have in a quantisation alone.
WHOLE_NUMBERS = ("I", "U", "BOOL")
OF_QUANTISATION = (*WHOLE_NUMBERS, "F8_", "F6_", "F4")
#: Names of the files of transformers' distributed checkpoints.
DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def weight_files(path: str | os.PathLike[str], is_own: Callable[[str], bool]) -> list[Path]:
    """The safetensors files of a Hub directory or id that have wanted tensors; only those are downloaded.

    Args:
        path: the directory or id.
        is_own: whether a tensor, by its name in the checkpoint, is wanted.

    Raises:
        CheckpointError: there are none, or the index names a file outside of the directory.
    """
    main = _main_file(path)
    if not _is_index(main):
        return [main]
    weight_map = read_weight_map(main)
    needed = sorted({file for key, file in weight_map.items() if is_own(key)}) or sorted(set(weight_map.values()))
    return [found for file in needed if (found := _cached(path, file)) is not None]


def names_of_tensors(path: str | os.PathLike[str]) -> list[str]:
    """The names of all tensors of a Hub directory or id. Raises CheckpointError as `weight_files`."""
    main = _main_file(path)
    if _is_index(main):
        return list(read_weight_map(main))
    with opened_weights(path, main) as opened:
        return list(opened.keys())


def dtype_of_weights(path: str | os.PathLike[str]) -> str | None:
    """The type of the weights of a Hub directory or id, by transformers' rule for dtype="auto".

    It is what the index says in its metadata, or else the type of the first floating-point tensor of the first file.
    None: there are no weights, or none of a type that a model can be trained in.

    Raises:
        CheckpointError: a file is damaged.
    """
    main = _main_file(path, is_needed=False)
    if main is not None and _is_index(main):
        metadata = strict_json.read(main, dict[str, Any]).get("metadata")
        if isinstance(metadata, dict) and isinstance(dtype := metadata.get("dtype"), str):
            return dtype
        main = optional_file(path, min(read_weight_map(main).values()))
    if main is None:
        return None
    with opened_weights(path, main) as opened:
        types = (opened.get_slice(name).get_dtype() for name in opened.keys())  # noqa: SIM118  (not a mapping)
        return next((_DTYPES[dtype] for dtype in types if dtype in _DTYPES), None)


def read_weight_map(index: Path) -> dict[str, str]:
    """Read an index: tensor name -> name of a file in the same directory. Raises CheckpointError if it is invalid."""
    content = strict_json.read(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} is no index of a sharded checkpoint: it has no mapping weight_map")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file or file == ".." or "\0" in file:
            raise CheckpointError(f"{index} names {file!r}, which is not a file of the same directory")
    return weight_map


@contextmanager
def opened_weights(path: str | os.PathLike[str], file: Path) -> Iterator[Any]:
    """Context manager that opens a file of a checkpoint, of which each tensor is read alone."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read a checkpoint at {str(path)!r}: {error}") from error


def mapped_tensors(
    path: str | os.PathLike[str], files: Iterable[Path], names: Collection[str]
) -> dict[str, torch.Tensor]:
    """The tensors of these names in files of a checkpoint, on the CPU; each is its mapped file."""
    mapped: dict[str, torch.Tensor] = {}
    for file in files:
        with opened_weights(path, file) as opened:
            mapped |= {name: opened.get_tensor(name) for name in {*opened.keys()}.intersection(names)}
    return mapped


def optional_file(path: str | os.PathLike[str], name: str, *, offline: bool = False) -> Path | None:
    """The path of a file of a Hub directory or id; None: it has none.

    Args:
        path: the directory or id.
        name: of the file.
        offline: whether a file that the cache lacks is none, too, where the Hub cannot be reached.

    Raises:
        CheckpointError: it cannot be read.
    """
    options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": not offline}
    return _cached(path, name, **options)


def _main_file(path: str | os.PathLike[str], *, is_needed: bool = True) -> Any:
    """The file of a Hub directory or id that has all weights, or the index of several."""
    files = os.listdir(path) if os.path.isdir(path) else ()
    if divided := next(filter(DISTRIBUTED.fullmatch, files), None):
        raise CheckpointError(
            f"{Path(path) / divided} is of a distributed checkpoint of transformers, which from_pretrained reads in "
            f"place of {SAFE_WEIGHTS_NAME}; load it there and save it with save_pretrained, or move these files away"
        )
    named = _named_file(path)
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME) if named is None else (named,):
        if (found := optional_file(path, name)) is not None:
            return found
    if not is_needed:
        return None
    names = f"neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}"
    if named is not None:
        names = f"no {named}, which transformers_weights of its {CONFIG_NAME} names"
    raise CheckpointError(f"{str(path)!r} has {names}; give a checkpoint in safetensors format")


def _named_file(path: str | os.PathLike[str]) -> str | None:
    """The file that the configuration names. Raises CheckpointError for one that is not inside of the directory."""
    config = optional_file(path, CONFIG_NAME)
    named = None if config is None else strict_json.read(config, dict[str, Any], allows_nan=True).get(_FIELD)
    if named is None:
        return None
    is_inside = isinstance(named, str) and not PurePosixPath(named).is_absolute() and "\0" not in named
    if not is_inside or ".." in PurePosixPath(named).parts or not named.endswith(_ENDS):
        raise CheckpointError(
            f"{config}: {_FIELD} is {named!r}, expected a file of the same directory whose name ends in "
            f"{' or '.join(_ENDS)}"
        )
    assert isinstance(named, str)
    return named


_FIELD, _ENDS = "transformers_weights", (".safetensors", ".safetensors.index.json")


def _is_index(file: Path) -> bool:
    return file.name.endswith(".index.json")


def _cached(path: str | os.PathLike[str], file: str, **options: Any) -> Path | None:
    try:
        found = cached_file(str(path), file, tqdm_class=Download, **options)
    except OSError as error:
        raise CheckpointError(f"cannot read a checkpoint at {str(path)!r}: {error}") from error
    return None if found is None else Path(found)
