"""The seconds that a step takes before its table begins, to generate tokens and to run forwards without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from hf_gpipe.planner.costs.model_costs import ModelCosts
from hf_gpipe.planner.costs.stage_costs import StageCosts
from hf_gpipe.planner.layout import Layout, completed, costs_of_table
from hf_gpipe.planner.machines.network import Network
from hf_gpipe.schedule import build, simulate

#: Bytes of a logit, which every process gets in float32.
_LOGIT_BYTES = 4


class Before(NamedTuple):
    """The seconds before the table of a step."""

    forwards: float = 0.0
    """Of forwards of all rows, such as a reference model's."""
    generation: float = 0.0
    """In which tokens are generated one after another."""


def before_table(layout: Layout, num_forwards: int, of_tokens: Callable[[int, int], ModelCosts] | None) -> Before:
    """Compute the seconds of what runs before the table of a step.

    Args:
        layout: the configuration.
        num_forwards: how often all forwards run.
        of_tokens: rows and their tokens -> the costs of the model's layers; None: nothing is generated.
    """
    forwards, table, inputs = 0.0, layout.table, layout.inputs
    if num_forwards:
        number = table.num_micro_batches // table.num_steps
        only = build("forward_only", table.num_stages, number, table.placement, is_checked=False)
        only = completed(only, layout.settings, inputs)
        forwards = num_forwards * float(simulate(only, costs_of_table(replace(layout, table=only))).total_seconds)
    if of_tokens is None:
        return Before(forwards)
    # What each token reads of the keys and values before it is left out, as is the search among the logits.
    first = _seconds_of_token(layout, of_tokens, max(inputs.mini_batch().target_tokens - inputs.new_tokens, 1))
    others = max(inputs.new_tokens - 1, 0) * _seconds_of_token(layout, of_tokens, 1)
    return Before(forwards, inputs.accumulation * (first + others))


def _seconds_of_token(layout: Layout, of_tokens: Callable[[int, int], ModelCosts], tokens: int) -> float:
    """The seconds in which a pipeline generates a token from so many, where the stages run one after another."""
    placement, processes, inputs = layout.table.placement, layout.processes, layout.inputs
    # The costs of one replica of the pipeline.
    rows = -(-inputs.mini_batch().rows // min(placement.replicas))
    sums = StageCosts(of_tokens(rows, tokens), processes.device)
    own = sum(
        sums.seconds(*stage.run, "none").forward_only / speed
        for stage, speed in zip(layout.stages, processes.speeds_of(placement), strict=True)
    )
    sent = [float(sums.costs.layers[stage.start].input_bytes) for stage in layout.stages[1:]]
    # The logits of a token travel back to every process.
    back = [float(_LOGIT_BYTES * rows * inputs.vocabulary)] * len(sent)
    network = processes.network(placement)
    return own + sum(_each(network, sent)) + max(_each(network, back), default=0.0)


def _each(network: Network, sizes: Sequence[float]) -> list[float]:
    """The seconds of a message over the slowest link of each boundary."""
    seconds = network.transfer_seconds(sizes)
    return [max(own for edge, own in seconds.items() if edge[0] == boundary) for boundary in range(len(sizes))]
