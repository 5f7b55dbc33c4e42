"""The images of a table's rows: decoded from bytes in the table, or from files of the data set's own folder.

A row may have a path in place of bytes, of a file or of one in a zip archive. A table comes from outside, so its path
is not opened where it leads out of the data, to another file of this machine or to the network.
"""

from __future__ import annotations

import glob
import os
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub

from hf_gpipe.data.files import check_data_set
from hf_gpipe.data.hub import asked, without_media
from hf_gpipe.data.splits import split_beside
from hf_gpipe.errors import DataError
from hf_gpipe.libraries.datasets import cache_folders
from hf_gpipe.recipe import DataSection
from hf_gpipe.text import size_text

_ZIP = "zip://"
#: How PostScript begins, a program that PIL lets Ghostscript run.
_POSTSCRIPT = (b"%!PS", b"\xc5\xd0\xd3\xc6")
#: The most bytes of an image's file. A member of an archive can claim to be many times as large as the archive.
MOST_BYTES = 1 << 29


def splits_with_images(data: DataSection) -> Any:
    """The splits of `data.path`, which `datasets` reads. Raises DataError where "train" is none of them."""
    path, options = str(data.path), dict[str, Any]()
    if _is_of_tables(path):
        source, options = "parquet", {"data_files": sorted(glob.glob(path)) or path}
    else:
        check_data_set(path, data.kind)
        source, options = path, {"name": data.subset, "revision": data.revision}
    splits = asked(path, None, lambda: datasets.load_dataset(source, **options))
    if "train" not in splits:
        raise DataError(f"{path} has no split 'train'; its splits are {', '.join(map(str, splits))}")
    return splits


def as_stored(splits: Any, path: str, field: str, *, is_list: bool = False) -> Any:
    """Splits whose field has the bytes or the path of an image, or of several, none of which is opened.

    Raises:
        DataError: the field has neither.
    """
    stored = datasets.Image(decode=False)
    return asked(path, None, partial(splits.cast_column, field, datasets.List(stored) if is_list else stored))


def divided(
    splits: Any, data: DataSection, text_of: Callable[[int], str], what: str, evaluated: Collection[str]
) -> dict[str, Any]:
    """The rows of the three splits of a corpus.

    A data set's own splits "validation" and "test" are kept. A split that it has not is cut off from the training rows
    by a hash of a text of each.

    Args:
        splits: of the data set.
        data: the section.
        text_of: the text of a training row, by its number.
        what: the rows, in messages.
        evaluated: the splits to evaluate on; of a data set's own splits the others are left empty.

    Raises:
        DataError: there is nothing to train on.
    """
    train, own = splits["train"], {name: splits[name] for name in ("validation", "test") if name in splits}
    numbers = split_beside(own, range(len(train)), data, text_of, f"{what} in {data.path}")
    parts = {name: train.select(rows) for name, rows in numbers.items()}
    return parts | {name: rows if name in evaluated else rows.select([]) for name, rows in own.items()}


class StoredRows:
    """A map-style dataset of the rows of `as_stored`, whose images are decoded, by PIL, when a row is asked for.

    Other columns are given as they are stored, because `datasets` would open the files that they name.

    Args:
        rows: a split.
        path: of the data: a directory, files or a data set of the Hub.
        field: a column of images, or of lists of images.
    """

    def __init__(self, rows: Any, path: str, field: str) -> None:
        self.features, self._field = rows.features, field
        self._decode = without_media(rows.features).decode_example
        self._rows, self._folders = rows.with_format("arrow"), _folders_of(path)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._decode(self._rows[index].to_pylist()[0])
        stored, image = row[self._field], partial(_image, self._folders)
        return {**row, self._field: [*map(image, stored)] if isinstance(stored, list) else image(stored)}


def _is_of_tables(path: str) -> bool:
    return glob.has_magic(path) or path.endswith(".parquet")


def _folders_of(path: str) -> list[Path]:
    """The folders in which the files of a data set are, without links; paths are relative to the first."""
    if _is_of_tables(path):
        folder = Path(path)
        while glob.has_magic(str(folder)) or folder.suffix == ".parquet":
            folder = folder.parent
        return [folder.resolve()]
    own = path if os.path.isdir(path) else huggingface_hub.constants.HF_HUB_CACHE
    # What `datasets` takes out of archives, and downloads from elsewhere.
    caches = cache_folders()[1:]
    return [Path(folder).resolve() for folder in (own, *caches)]


def _image(folders: Sequence[Path], stored: Mapping[str, Any] | None) -> Any:
    """An image of PIL, turned as its EXIF data says.

    Raises:
        DataError: its path leads out of the folders, or it is PostScript.
    """
    if stored is None:
        return None
    content, path = stored["bytes"], stored["path"]
    if content is None and path is not None:
        content = _content(folders, path)
    if content is not None and content.startswith(_POSTSCRIPT):
        raise DataError("its image is PostScript, which is a program and is not run; convert it, for example to PNG")
    return datasets.Image().decode_example({"bytes": content, "path": None})


def _content(folders: Sequence[Path], path: str) -> bytes:
    """The bytes of a file, or of one in an archive, whose path is zip://FILE::ARCHIVE as `datasets` writes it."""
    member, _, archive = path.removeprefix(_ZIP).partition("::") if path.startswith(_ZIP) else ("", "", path)
    file = (folders[0] / archive).resolve()  # an absolute path takes the place of the folder
    if "://" in archive or not any(map(file.is_relative_to, folders)):
        raise DataError(
            f"its image is {path!r}, which is not in the folder of the data; put the image's bytes into the table"
        )
    with zipfile.ZipFile(file) if member else nullcontext() as archived:
        size = file.stat().st_size if archived is None else archived.getinfo(member).file_size
        if size > MOST_BYTES:
            raise DataError(
                f"its image is {path!r} of {size_text(size)}; an image has at most {size_text(MOST_BYTES)}, so make "
                "it smaller or leave the row out"
            )
        return file.read_bytes() if archived is None else archived.read(member)
