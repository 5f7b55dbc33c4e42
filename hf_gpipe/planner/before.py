"""The seconds that a step takes before its table begins, to generate tokens and to run forwards without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hf_gpipe.planner.costs.prefix_sums import LayerSums
from hf_gpipe.planner.machines.network import Network
from hf_gpipe.planner.memory import StageLayers

#: Bytes of a logit, which every process gets in float32.
_LOGIT_BYTES = 4


class Before(NamedTuple):
    """The seconds before the table of a step.

    Attributes:
        forwards: of forwards of all rows, such as those of a reference.
        generation: of tokens that are generated one after another.
    """

    forwards: float = 0.0
    generation: float = 0.0


NOTHING_BEFORE = Before()


def generation_seconds(
    sums_of: Callable[[int, int], LayerSums],
    rows: int,
    prompt_tokens: int,
    new_tokens: int,
    vocabulary: int,
    stages: Sequence[StageLayers],
    speeds: Sequence[float],
    network: Network,
) -> float:
    """The seconds in which a pipeline generates, where the stages of each token run one after another.

    What each token reads of the keys and values before it is left out, as is the search among the logits.

    Args:
        sums_of: rows and their tokens -> the costs of the model's layers.
        rows: of one replica of the pipeline.
        prompt_tokens: of each row.
        new_tokens: of each row.
        vocabulary: number of logits of a token, which travel back to every process.
        stages: their layers.
        speeds: of the processes of the stages, relative to the device.
        network: the links.
    """

    def once(tokens: int) -> float:
        sums = sums_of(rows, tokens)
        own = sum(
            sums.seconds(stage.start, stage.stop, "none").forward_only / speed
            for stage, speed in zip(stages, speeds, strict=True)
        )
        sent = [float(sums.costs.layers[stage.start].input_bytes) for stage in stages[1:]]
        back = [float(_LOGIT_BYTES * rows * vocabulary)] * len(sent)
        return own + _slowest(network, sent) + max(_each(network, back), default=0.0)

    return once(max(prompt_tokens, 1)) + max(new_tokens - 1, 0) * once(1)


def _each(network: Network, sizes: Sequence[float]) -> list[float]:
    """For each boundary the seconds of its slowest link."""
    seconds = network.transfer_seconds(sizes)
    return [max(own for edge, own in seconds.items() if edge[0] == boundary) for boundary in range(len(sizes))]


def _slowest(network: Network, sizes: Sequence[float]) -> float:
    return sum(_each(network, sizes))
