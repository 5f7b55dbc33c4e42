"""The windows of a training: the steps that run as one table.

A window ends at the next log, evaluation or checkpoint, where every weight has had the same updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hf_gpipe.libraries.transformers_trainer import IntervalStrategy, SaveStrategy
from hf_gpipe.schedule import LONGEST_WINDOW
from hf_gpipe.training.loader import Batch
from hf_gpipe.training.trainer_interface import TrainerInterface

Group = Sequence[Batch]
"""The mini-batches of a step."""


def windows(groups: Iterable[Group], trainer: TrainerInterface) -> Iterator[list[Group]]:
    """Yield the steps that run as one table: a window where the schedule has windows, else one step.

    Args:
        groups: the steps of an epoch.
        trainer: the trainer. Its arguments say where logs, evaluations and checkpoints come; its state is at the end of
            the window before.
    """
    window: list[Group] = []
    for group in groups:
        window.append(group)
        if len(window) >= (_steps_to_next_end(trainer) if trainer.pipe.runs_windows else 1):
            yield window
            window = []
    if window:
        yield window


def _steps_to_next_end(trainer: TrainerInterface) -> int:
    args, state = trainer.args, trainer.state
    every = [state.logging_steps] if args.logging_strategy == IntervalStrategy.STEPS else []
    every += [state.eval_steps] if args.eval_strategy == IntervalStrategy.STEPS else []
    every += [state.save_steps] if args.save_strategy == SaveStrategy.STEPS else []
    steps = [int(size - state.global_step % size) for size in every if size is not None and size > 0]
    if args.logging_first_step and state.global_step == 0:
        steps.append(1)
    return min([LONGEST_WINDOW, *steps])
