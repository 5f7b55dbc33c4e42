"""How well a model predicts held-out text: the loss per token, and its exponential."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_gpipe.data.collate import PairCollator
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.training.loader import Batch
from hf_gpipe.training.predicting import predict


@dataclass(frozen=True)
class TextReport:
    """Of held-out rows.

    Attributes:
        num_rows: the number of blocks of text, or of conversations.
        num_tokens: the number of target tokens: all but the first of a block, or what is learnt of a conversation.
        loss: negative log-likelihood per predicted token, natural logarithm.
    """

    num_rows: int
    num_tokens: int
    loss: float

    @property
    def perplexity(self) -> float:
        """exp(loss): so many equally likely tokens would be as hard to tell apart; infinite beyond float."""
        return math.inf if self.loss > 700 else math.exp(self.loss)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"task": "language modelling", **asdict(self), "perplexity": self.perplexity}

    def text(self) -> str:
        """One line for people."""
        return f"loss {self.loss:.4f}, perplexity {self.perplexity:.2f}"


def evaluate_text(
    pipe: Pipeline,
    make_rows: Callable[[], Sequence[Mapping[str, list[int]]]],
    batch_size: int,
    *,
    max_rows: int | None = None,
) -> TextReport:
    """The loss of a decoder-only model on held-out rows, each target token counting alike.

    Every process calls it, and every process gets the same report. Logits are not clipped and labels not smoothed.

    Args:
        pipe: the model.
        make_rows: returns a dataset of {"input_ids", "labels"}; called in the main process only.
        batch_size: rows at a time; they are cut into the pipeline's micro-batches.
        max_rows: how many to take, the first ones; None: all.

    Raises:
        DataError: on every process, what `make_rows` raises in the main one.
    """
    made: list[Sequence[Mapping[str, list[int]]]] = []

    def prepare() -> int:
        made.append(make_rows())
        return min(len(made[0]), max_rows or len(made[0]))

    num_rows = pipe.topology.from_reader(prepare, takes_long=True)

    def mini_batches(rows: Sequence[Mapping[str, list[int]]]) -> Iterator[Batch]:
        # The mask leaves padding out, so any token serves as padding.
        collate = PairCollator(0)
        for start in range(0, num_rows, batch_size):
            yield collate([rows[index] for index in range(start, min(start + batch_size, num_rows))])

    nll, num_tokens = 0.0, 0
    for one in predict(pipe, mini_batches(made[0]) if made else None):
        nll += float(one.evaluation.row_nll.sum())
        num_tokens += int(one.evaluation.row_tokens.sum())
    return TextReport(num_rows, num_tokens, nll / max(num_tokens, 1))
