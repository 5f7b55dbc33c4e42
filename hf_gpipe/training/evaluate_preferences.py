"""How well a model tells chosen from rejected answers of held-out preferences, by their likelihood."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hf_gpipe.data.preferences import PreferenceCollator, PreferenceExamples
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.runtime.batches import shared_stream
from hf_gpipe.training.held_out import held_out


@dataclass(frozen=True)
class PreferenceReport:
    """Of held-out pairs of answers.

    Attributes:
        num_pairs: their number.
        accuracy: the share of them whose chosen answer is more likely than the rejected one.
        logps_chosen: mean log-probability of the chosen answers, natural logarithm.
        logps_rejected: the same of the rejected ones.
    """

    num_pairs: int
    accuracy: float
    logps_chosen: float
    logps_rejected: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"task": "preferences", **asdict(self)}

    def text(self) -> str:
        """One line for people."""
        return (
            f"the chosen answer is the more likely one in {self.accuracy:.1%}; log-probabilities: chosen "
            f"{self.logps_chosen:.2f}, rejected {self.logps_rejected:.2f}"
        )


def evaluate_preferences(
    pipe: Pipeline, make_rows: Callable[[], PreferenceExamples], batch_size: int, *, max_pairs: int | None = None
) -> PreferenceReport:
    """Compare the likelihoods of held-out answers, without a reference.

    Every process calls it, and every process gets the same report.

    Args:
        pipe: the model.
        make_rows: called in the main process only.
        batch_size: pairs at a time.
        max_pairs: how many to take, the first ones; None: all.

    Raises:
        DataError: on every process, what `make_rows` raises in the main one.
    """
    # The mask leaves padding out, so any token serves as padding.
    _, batches = held_out(pipe, make_rows, PreferenceCollator(0), batch_size, max_pairs)
    with pipe.holding_weights():
        stream = shared_stream(None if batches is None else ([batch] for batch in batches), pipe.world)
        found = torch.cat([pipe.log_probs(batch) for (batch,) in stream]).view(-1, 2)
    chosen, rejected = found.unbind(dim=1)
    accuracy = float((chosen > rejected).double().mean())
    return PreferenceReport(len(found), accuracy, float(chosen.mean()), float(rejected.mean()))
