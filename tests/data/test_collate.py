"""Padding: to the longest row, on the right side, with the right filler."""

from __future__ import annotations

import torch

from hf_gpipe.data import PairCollator

ROWS = [{"input_ids": [5, 6, 1], "labels": [7, 1]}, {"input_ids": [8, 1], "labels": [9, 9, 9, 1]}]


def test_rows_are_padded_to_the_longest():
    batch = PairCollator(pad_token_id=0)(ROWS)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 1], [8, 1, 0]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "labels": [[7, 1, -100, -100], [9, 9, 9, 1]],
    }
    assert {tensor.dtype for tensor in batch.values()} == {torch.long}


def test_a_real_token_equal_to_the_pad_token_is_attended_to():
    assert PairCollator(pad_token_id=1)(ROWS)["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
