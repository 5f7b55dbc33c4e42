"""The seconds that a step takes before its table begins, to generate tokens and to run forwards without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from hf_gpipe.planner.costs.model_costs import ModelCosts
from hf_gpipe.planner.costs.stage_costs import StageCosts
from hf_gpipe.planner.layout import Layout
from hf_gpipe.planner.machines.network import Network
from hf_gpipe.planner.table_costs import costs_of_table
from hf_gpipe.planner.tables import completed
from hf_gpipe.schedule import build, simulate

#: Bytes of a logit, which every process gets in float32.
_LOGIT_BYTES = 4


class Before(NamedTuple):
    """The seconds before the table of a step.

    Attributes:
        forwards: the seconds of forwards of all rows, such as a reference model's.
        generation: the seconds in which tokens are generated one after another.
    """

    forwards: float = 0.0
    generation: float = 0.0


def before_table(layout: Layout, num_forwards: int, of_tokens: Callable[[int, int], ModelCosts] | None) -> Before:
    """Compute the seconds of what runs before the table of a step.

    Args:
        layout: the configuration.
        num_forwards: how often all forwards run.
        of_tokens: rows and their tokens -> the costs of the model's layers; None: nothing is generated.
    """
    forwards, table = 0.0, layout.table
    if num_forwards:
        number = table.num_micro_batches // table.num_steps
        only = build("forward_only", table.num_stages, number, table.placement, is_checked=False)
        only = completed(only, layout.settings, layout.inputs)
        own = float(simulate(only, costs_of_table(replace(layout, table=only))).total_seconds)
        forwards = num_forwards * own
    generation = 0.0 if of_tokens is None else layout.inputs.accumulation * _generation_seconds(layout, of_tokens)
    return Before(forwards, generation)


def _generation_seconds(layout: Layout, of_tokens: Callable[[int, int], ModelCosts]) -> float:
    """The seconds in which a pipeline generates, where the stages of each token run one after another.

    What each token reads of the keys and values before it is left out, as is the search among the logits.
    """
    placement, processes, example = layout.table.placement, layout.processes, layout.inputs.mini_batch()
    speeds, network = processes.speeds_of(placement), processes.network(placement)
    # The costs of one replica of the pipeline.
    rows = -(-example.rows // min(placement.replicas))

    def once(tokens: int) -> float:
        sums = StageCosts(of_tokens(rows, tokens), processes.device)
        own = sum(
            sums.seconds(*stage.run, "none").forward_only / speed
            for stage, speed in zip(layout.stages, speeds, strict=True)
        )
        sent = [float(sums.costs.layers[stage.start].input_bytes) for stage in layout.stages[1:]]
        # The logits of a token travel back to every process.
        back = [float(_LOGIT_BYTES * rows * layout.inputs.vocabulary)] * len(sent)
        return own + sum(_each(network, sent)) + max(_each(network, back), default=0.0)

    new_tokens = layout.inputs.new_tokens
    return once(max(example.target_tokens - new_tokens, 1)) + max(new_tokens - 1, 0) * once(1)


def _each(network: Network, sizes: Sequence[float]) -> list[float]:
    """The seconds of a message over the slowest link of each boundary."""
    seconds = network.transfer_seconds(sizes)
    return [max(own for edge, own in seconds.items() if edge[0] == boundary) for boundary in range(len(sizes))]
