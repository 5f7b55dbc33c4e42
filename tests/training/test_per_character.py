"""The validation loss per character, and the rate that a resumed training begins with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import EvalPrediction, get_scheduler

from hf_gpipe.tasks.translation.evaluate import PerCharacter
from hf_gpipe.training.optim import set_rates


def test_the_loss_of_all_tokens_is_divided_by_all_characters() -> None:
    labels = np.array([[5, 6, 7], [5, -100, -100]])
    prediction = EvalPrediction(predictions=None, label_ids=labels, losses=np.array([2.0, 4.0]))
    assert PerCharacter(20)(prediction) == {"nll_per_character": pytest.approx((3 * 2.0 + 1 * 4.0) / 20)}


def test_a_training_that_gets_more_updates_goes_on_with_the_rate_of_its_new_schedule() -> None:
    """At the end of the old schedule the rate was 0, and the next update must not be lost."""

    def schedule(optimizer: torch.optim.Optimizer, steps: int, decay: int) -> torch.optim.lr_scheduler.LRScheduler:
        kwargs = {"num_decay_steps": decay}
        return get_scheduler("warmup_stable_decay", optimizer, 2, steps, scheduler_specific_kwargs=kwargs)

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = schedule(optimizer, 10, 0)
    for _ in range(10):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0
    saved = scheduler.state_dict()
    longer = schedule(optimizer, 20, 10)
    longer.load_state_dict(saved)
    set_rates(optimizer, longer)
    assert optimizer.param_groups[0]["lr"] == 0.5
