"""The costs of rows that are cut into chunks: of each chunk, and of the one that stands for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from hf_gpipe.planner.costs import ModelCosts, mean_seconds
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe import PipelineConfig

#: "auto" cuts rows into powers of two, at most so many, and no chunk is shorter: with fewer tokens a product wastes a
#: device.
MOST_CHUNKS, SHORTEST_CHUNK = 64, 256


def chunk_counts(config: PipelineConfig, tokens: int) -> list[int]:
    """The numbers of chunks that a configuration allows for rows of so many tokens; of "auto" powers of two."""
    if isinstance(config.sequence_chunks, int):
        return [config.sequence_chunks]
    if (most := config.most_chunk_tokens) is not None:
        return [-(-tokens // most)]
    limit = min(MOST_CHUNKS, max(tokens // SHORTEST_CHUNK, 1))
    return [2**power for power in range(limit.bit_length())]


def each_chunk(workload: Workload, most: int, costs_of: Callable[[Workload], ModelCosts]) -> tuple[ModelCosts, ...]:
    """The costs of each chunk of a micro-batch, of one that is not cut its own.

    Args:
        workload: the micro-batch.
        most: into how many chunks its rows are cut, where they have as many tokens.
        costs_of: the costs of a micro-batch or a chunk.
    """
    chunks = workload.in_chunks(most) if most > 1 else [workload]
    # A tracer reads off the chunks between these.
    first = [*{0, len(chunks) - 1, len(chunks) // 2}]
    found = {number: costs_of(chunks[number]) for number in [*first, *range(len(chunks))]}
    return tuple(found[number] for number in range(len(chunks)))


def typical(chunks: Sequence[ModelCosts]) -> ModelCosts:
    """One chunk for all of a row: its bytes are those of the last, which attends to most; its time is the mean."""
    last = chunks[-1]
    if len(chunks) == 1:
        return last
    layers = [
        replace(
            same[-1],
            forward_flops=round(fmean(one.forward_flops for one in same)),
            backward_flops=round(fmean(one.backward_flops for one in same)),
            seconds=mean_seconds(one.seconds for one in same),
        )
        for same in zip(*(one.layers for one in chunks), strict=True)
    ]
    return replace(last, layers=tuple(layers), stage_seconds=mean_seconds(one.stage_seconds for one in chunks))
