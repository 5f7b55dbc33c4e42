"""Answers that are wanted or not, each by itself, as token ids; and mini-batches with mismatched answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.examples.chats import conversation_of
from hf_gpipe.data.examples.preferences import PreferenceExamples
from hf_gpipe.data.examples.rows import ReadRow
from hf_gpipe.errors import DataError


def judged_of(where: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's "prompt" and "completion" as `conversation_of` reads them, with its "label".

    Args:
        where: the row's name in messages.
        row: has `prompt`, `completion` and `label`, true where the completion is wanted.

    Raises:
        DataError: as `conversation_of`, a label of another form, or rows of pairs; names the row and the column.
    """
    if "chosen" in row and "rejected" in row:
        raise DataError(
            f"{where}: 'chosen' and 'rejected' are a pair; give each as a row of its own, with 'prompt', 'completion' "
            "and 'label' (trl.data_utils.unpair_preference_dataset does so)"
        )
    label = row.get("label")
    # True and False are 1 and 0; a label of another type, as 1.0 or "1", may be a score.
    if not isinstance(label, int) or label not in (0, 1):
        raise DataError(
            f"{where}: 'label' is {label!r}; it must be true or 1 where the completion is wanted, else false or 0"
        )
    read = conversation_of(where, {name: value for name, value in row.items() if name != "messages"})
    return read | {"label": bool(label)}


class KTOExamples(PreferenceExamples):
    """A dataset of {"prompt_ids": [...], "completion_ids": [...], "label": [1 or 0]}, 1 for a wanted completion.

    The ids are those of TRL's KTOTrainer with the same arguments. The result is kept in the cache of `datasets`.

    Args:
        rows: as `judged_of` reads them, or the split of a corpus that it has read.
        tokenizer, max_length: as for `PreferenceExamples`.

    Raises:
        DataError: a row of another form or that the template refuses, a tokenizer without a template, or no example.
    """

    _name, columns = "kto", ("prompt_ids", "completion_ids", "label")
    _read = staticmethod(judged_of)
    _answers, _cuts_answers = ("completion",), False

    def _example(self, read: ReadRow) -> tuple[Sequence[int] | Sequence[float], ...] | None:
        ids = super()._example(read)
        return None if ids is None else (*ids, [int(read.row["label"])])

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each example in a mini-batch, for length bucketing."""
        return [min(length, self._max_length or length) for length in super().lengths]


@dataclass(frozen=True)
class KTOCollator(PairCollator):
    """Mini-batches of {"prompt_ids", "completion_ids", "label"}.

    Returns input_ids, attention_mask and labels (N, T), padded on the right; labels are -100 in prompts; and desirable
    (N,). With mismatches also KL_input_ids, KL_attention_mask and KL_labels (N, T'): each prompt with the completion of
    the row before it, and the first with the last. Where the rows have "ref_logps", and "ref_KL_logps", those too (N,),
    in float64. Rows are cut to `max_length` tokens.
    """

    max_length: int | None = None
    has_mismatches: bool = True

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self.of_answers([(row["prompt_ids"], row["completion_ids"]) for row in rows], self.max_length)
        batch["desirable"] = torch.tensor([row["label"] for row in rows]).view(-1).bool()
        if self.has_mismatches:
            shifted = [rows[-1], *rows[:-1]]
            pairs = [(row["prompt_ids"], other["completion_ids"]) for row, other in zip(rows, shifted, strict=True)]
            batch |= {f"KL_{name}": tensor for name, tensor in self.of_answers(pairs, self.max_length).items()}
        for name in ("ref_logps", "ref_KL_logps"):
            if name in rows[0]:
                batch[name] = torch.tensor([row[name] for row in rows], dtype=torch.float64)
        return batch
