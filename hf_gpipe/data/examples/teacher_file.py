"""A teacher's most likely tokens for the rows of a dataset, in a safetensors file, in place of the teacher.

The file has, for the positions of all rows one after another, "tokens" (P, k), "log_probs" (P, k) and "input_ids" (P,),
and "offsets" (N + 1,), at which rows begin. Rows are found by their ids. The file comes from outside: it is checked
when it is opened, a block at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils.data import Dataset

from hf_gpipe.adapters.text_entries import token_ids
from hf_gpipe.errors import DataError
from hf_gpipe.losses.cached_teacher import TEACHER_LOG_PROBS, TEACHER_TOKENS

#: Name -> the type, and the number of dimensions.
_TENSORS = {
    "tokens": (torch.int32, 2),
    "log_probs": (torch.float32, 2),
    "input_ids": (torch.int32, 1),
    "offsets": (torch.int64, 1),
}
#: Positions that are checked at a time; probabilities that may be too much by rounding.
_BLOCK, _ROUNDING = 1 << 16, 1e-3


def write_top_k(
    path: str | Path,
    rows: Sequence[tuple[Sequence[int], torch.Tensor, torch.Tensor]],
    *,
    vocabulary: int,
    temperature: float,
) -> None:
    """Write the file.

    Args:
        path: of the file.
        rows: of each row its ids (T,), and of each of its positions the teacher's k most likely next tokens and the
            logarithms of their probabilities, (T, k) both.
        vocabulary: logits of the teacher.
        temperature: by which its logits were divided.
    """
    offsets = np.cumsum([0, *(len(ids) for ids, _, _ in rows)])
    tensors = {
        "tokens": torch.cat([tokens for _, tokens, _ in rows]).int(),
        "log_probs": torch.cat([log_probs for _, _, log_probs in rows]).float(),
        "input_ids": torch.tensor([token for ids, _, _ in rows for token in ids], dtype=torch.int32),
        "offsets": torch.from_numpy(offsets).long(),
    }
    save_file(tensors, path, metadata={"vocabulary": str(vocabulary), "temperature": repr(float(temperature))})


class TeacherFile:
    """A file that `write_top_k` has written.

    Args:
        path: of the file.
        vocabulary: logits of the student.
        temperature: of the loss.

    Raises:
        DataError: it cannot be read, is damaged, or belongs to another vocabulary or temperature.
    """

    def __init__(self, path: str | Path, *, vocabulary: int, temperature: float) -> None:
        self._path = Path(path)
        try:
            self._file: Any = safe_open(self._path, framework="pt").__enter__()
            self._check(vocabulary, temperature)
        except (OSError, SafetensorError) as error:
            raise DataError(f"the teacher's file {path} cannot be read: {error}; write it again") from error

    def _check(self, vocabulary: int, temperature: float) -> None:
        metadata = dict(self._file.metadata() or {})
        for name, value in (("vocabulary", str(vocabulary)), ("temperature", repr(float(temperature)))):
            if metadata.get(name) != value:
                self._fail(f"its {name} is {metadata.get(name)!r}, and the student's loss needs {value!r}")
        if (names := {*self._file.keys()}) != _TENSORS.keys():
            self._fail(f"it has the tensors {', '.join(sorted(names))}, and not {', '.join(sorted(_TENSORS))}")
        slices = {name: self._file.get_slice(name) for name in _TENSORS}
        shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        for name, (dtype, dimensions) in _TENSORS.items():
            if len(shapes[name]) != dimensions or slices[name][:0].dtype != dtype:
                self._fail(f"{name!r} has the shape {shapes[name]} or another type than {dtype}")
        count, k = shapes["tokens"]
        if shapes["log_probs"] != (count, k) or shapes["input_ids"] != (count,) or not 1 <= k <= vocabulary:
            self._fail(f"its tensors have the shapes {shapes}, which do not fit")
        offsets = self._file.get_tensor("offsets")
        if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != count or bool((offsets.diff() < 1).any()):
            self._fail("its offsets do not grow from 0 to the number of positions")
        for start in range(0, count, _BLOCK):
            tokens, log_probs = (slices[name][start : start + _BLOCK] for name in ("tokens", "log_probs"))
            in_order = tokens.sort(dim=1).values
            if bool(((tokens < 0) | (tokens >= vocabulary)).any()) or bool((in_order.diff(dim=1) == 0).any()):
                self._fail("a token is outside of the vocabulary, or twice at a position")
            if not bool(log_probs.isfinite().all()) or bool((log_probs.exp().sum(1) > 1 + _ROUNDING).any()):
                self._fail("its probabilities are not finite, or add up to more than 1")
        ids = self._file.get_tensor("input_ids").numpy()
        bounds = offsets.tolist()
        self._slices = slices
        self._places = {_digest(ids[start:stop]): (start, stop) for start, stop in pairwise(bounds)}

    def _fail(self, message: str) -> None:
        raise DataError(f"the teacher's file {self._path}: {message}; write it again")

    def of(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """The entries (T, k) of a row with these ids. Raises DataError where the file has no such row."""
        place = self._places.get(_digest(np.asarray(ids, dtype=np.int32)))
        if place is None:
            raise DataError(
                f"the teacher's file {self._path} has no row of these {len(ids)} tokens; write it of the same rows, "
                "with the same tokenizer and max_length"
            )
        tokens, log_probs = (self._slices[name][slice(*place)] for name in ("tokens", "log_probs"))
        return {TEACHER_TOKENS: tokens, TEACHER_LOG_PROBS: log_probs}


def _digest(ids: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(ids, dtype=np.int32).tobytes(), digest_size=16).digest()


class WithTeacher(Dataset[dict[str, Any]]):
    """The rows of a map-style dataset of "input_ids", with the teacher's most likely tokens beside them.

    Args:
        dataset: the rows.
        file: has all of them.
    """

    def __init__(self, dataset: Any, file: TeacherFile) -> None:
        self._dataset, self._file = dataset, file

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = dict(self._dataset[index])
        return row | self._file.of(token_ids(row))

    @property
    def lengths(self) -> list[int]:
        """The lengths of the rows, for length bucketing."""
        return list(self._dataset.lengths)


@dataclass(frozen=True)
class TeacherCollator:
    """Mini-batches of the rows of `WithTeacher`: those of another collator, which pads on the right, with two entries.

    "teacher_tokens" and "teacher_log_probs" are (B, T, k). Padding has k different tokens of no probability.
    """

    collator: Callable[[list[Any]], Mapping[str, torch.Tensor]]

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        names = (TEACHER_TOKENS, TEACHER_LOG_PROBS)
        batch = dict(self.collator([{n: v for n, v in row.items() if n not in names} for row in rows]))
        shape = (*token_ids(batch).shape, rows[0][TEACHER_TOKENS].shape[1])
        batch[TEACHER_TOKENS] = torch.arange(shape[2], dtype=torch.int32).expand(shape).clone()
        batch[TEACHER_LOG_PROBS] = torch.full(shape, math.log(0.5 / shape[2]))
        for number, row in enumerate(rows):
            for name in names:
                batch[name][number, : len(row[name])] = row[name]
        return batch
