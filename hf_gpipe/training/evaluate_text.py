"""How well a model predicts held-out text: the loss per token, and its exponential."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.text import TokenBlocks
from hf_gpipe.errors import DataError
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.training.loader import Batch
from hf_gpipe.training.predicting import predict


@dataclass(frozen=True)
class TextReport:
    """Of held-out blocks.

    Attributes:
        num_blocks: how many there are.
        num_tokens: predicted tokens, all but the first of each block.
        loss: negative log-likelihood per predicted token, natural logarithm.
    """

    num_blocks: int
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
    tokenizer: PreTrainedTokenizerBase | None,
    documents: Sequence[str] | None,
    batch_size: int,
    block_tokens: int,
    *,
    max_blocks: int | None = None,
) -> TextReport:
    """The loss of a decoder-only model on documents cut into blocks as in training, each token counting alike.

    Every process calls it; what the main process gives is used, the others may give None, and every process gets the
    same report. Logits are not clipped and labels not smoothed.

    Args:
        pipe: the model.
        tokenizer: of the documents.
        documents: held-out text.
        batch_size: blocks at a time; they are cut into the pipeline's micro-batches.
        block_tokens: longest block; its first token is given, the others are predicted.
        max_blocks: how many to take, the first ones; None: all.

    Raises:
        DataError: on every process, where there is no text, or the tokenizer has no end-of-sequence token.
    """
    made: list[TokenBlocks] = []

    def prepare() -> int:
        if not documents or tokenizer is None:
            raise DataError("there is no text to evaluate on; the split is empty")
        made.append(TokenBlocks(documents, tokenizer, block_tokens))
        return min(len(made[0]), max_blocks or len(made[0]))

    num_blocks = pipe.topology.from_reader(prepare)

    def mini_batches(blocks: TokenBlocks) -> Iterator[Batch]:
        # All blocks but the last are equally long, and the mask leaves padding out, so any token serves as padding.
        collate = PairCollator(0)
        for start in range(0, num_blocks, batch_size):
            yield collate([blocks[index] for index in range(start, min(start + batch_size, num_blocks))])

    nll, num_tokens = 0.0, 0
    for one in predict(pipe, mini_batches(made[0]) if made else None):
        nll += float(one.evaluation.row_nll.sum())
        num_tokens += int(one.evaluation.row_tokens.sum())
    return TextReport(num_blocks, num_tokens, nll / max(num_tokens, 1))
