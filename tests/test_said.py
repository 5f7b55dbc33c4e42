"""What a Pipeline says when it is made, at any usual verbosity and once: the planner's choice, and missing overlap."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from hf_gpipe import Pipeline
from tests.gloo import run_gloo
from tests.oracle import padded_batch, tiny_config


def said(*args: Any, trains: int = 0, **options: Any) -> list[str]:
    """The messages of at least the level WARNING while a Pipeline is made and so many mini-batches are trained on."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hf_gpipe")
    logger.addHandler(handler)
    try:
        pipe = Pipeline(config := tiny_config("llama", tied=False), *args, **options)
        pipe.eval_step(padded_batch(config))
        for _ in range(2 if trains else 0):
            pipe.train_step([padded_batch(config)] * trains)
    finally:
        logger.removeHandler(handler)
    return messages


def test_the_planner_s_choice_is_shown_from_python() -> None:
    """It was logged as information, which nobody sees who does not ask for it, and a peak of some MiB without a word
    stood beside the half GiB of a process on a CPU."""
    (message,) = said(2, "auto", "gpipe", "stage", example=padded_batch(tiny_config("llama")))
    assert message.startswith("planner: num_micro_batches ")
    assert message.endswith("; torch and other libraries take CPU memory beside it")
    assert said(2, 2) == []


def said_by_this_process() -> list[str]:
    example = padded_batch(tiny_config("llama")) if dist.get_rank() == 0 else None
    return [*said(2, "auto", "gpipe", "stage", example=example), *said(2, 1, trains=1)]


def test_one_process_says_it() -> None:
    first, second = run_gloo(said_by_this_process, 2)
    assert [text.split(":")[0] for text in first] == ["planner", "num_micro_batches is 1 and num_stages is 2"]
    assert second == []


def test_stages_that_do_not_overlap_are_told() -> None:
    """Two stages with one micro-batch took turns, and nothing said so."""
    (message,) = said(2, 1, trains=1)
    assert "nothing overlaps; give num_micro_batches=8" in message
    assert said(2, 1) == [], "who evaluates and generates loses nothing"
    for own in ((3, 2), (1, 1)):
        assert said(*own, trains=1) == []
    assert said(3, 1, trains=2) == [], "accumulated mini-batches overlap"
