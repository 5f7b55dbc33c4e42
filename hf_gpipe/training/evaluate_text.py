"""How well a model predicts held-out text: the loss per token, and its exponential."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_gpipe.data.collate import PairCollator
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.training.held_out import held_out
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
    # The mask leaves padding out, so any token serves as padding.
    num_rows, batches = held_out(pipe, make_rows, PairCollator(0), batch_size, max_rows)
    nll, num_tokens = 0.0, 0
    for one in predict(pipe, batches):
        nll += float(one.evaluation.row_nll.sum())
        num_tokens += int(one.evaluation.row_tokens.sum())
    return TextReport(num_rows, num_tokens, nll / max(num_tokens, 1))
