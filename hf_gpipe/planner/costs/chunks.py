"""The costs of rows that are cut into chunks: of each chunk, and of a chunk that stands for all chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from hf_gpipe.planner.costs.model_costs import ModelCosts, Operations, mean_seconds
from hf_gpipe.planner.costs.stage_costs import StageCosts
from hf_gpipe.planner.workload import Workload
from hf_gpipe.settings.chunks import Chunks
from hf_gpipe.settings.pipeline import PipelineConfig

#: The most chunks and the fewest tokens of a chunk where "auto" cuts rows, into powers of two: shorter products waste
#: a device.
MOST_CHUNKS, SHORTEST_CHUNK = 64, 256


def ways_to_cut(config: PipelineConfig, tokens: int) -> list[Chunks]:
    """The ways to cut rows of so many tokens that a configuration allows; "auto" allows powers of two. An open taper
    is 0 in them."""
    number, longest, taper = config.chunks.sequence_chunks, config.chunks.most_tokens, config.chunks.chunk_taper
    counts = [number] if isinstance(number, int) else [-(-tokens // longest)] if longest is not None else []
    limit = min(MOST_CHUNKS, max(tokens // SHORTEST_CHUNK, 1))
    counts = counts or [2**power for power in range(limit.bit_length())]
    return [Chunks(count, taper if count > 1 and not isinstance(taper, str) else 0.0) for count in counts]


def each_chunk(
    workload: Workload, chunks: Chunks, costs_of: Callable[[Workload], ModelCosts]
) -> tuple[ModelCosts, ...]:
    """The costs of each chunk of a micro-batch, or the costs of the micro-batch where it is not cut.

    Args:
        workload: the micro-batch.
        chunks: how its rows are cut.
        costs_of: the costs of a micro-batch or a chunk.
    """
    own = workload.in_chunks(chunks) if chunks.most > 1 else [workload]
    # A tracer reads off the chunks between these, where all are equally long.
    first = [*{0, len(own) - 1, len(own) // 2}]
    costs = {number: costs_of(own[number]) for number in [*first, *range(len(own))]}
    return tuple(costs[number] for number in range(len(own)))


def taper_of(chunks: Sequence[StageCosts]) -> float:
    """The taper with which all chunks take equal time, from the costs of equally long chunks, which grow evenly."""
    count = len(chunks)
    blocks = [index for index, layer in enumerate(chunks[0].costs.layers) if layer.kind == "block"]
    first, last = (
        sum(chunk.seconds(index, index + 1, "none").of_micro_batch() for index in blocks)
        for chunk in (chunks[0], chunks[-1])
    )
    # The middles of the first chunk and of the last take 1 + taper / 2k and 1 + taper (1 - 1 / 2k).
    ratio, middle = last / first, 1 / (2 * count)
    return max(round((ratio - 1) / max(1 - middle - ratio * middle, 1e-3), 2), 0.0)


def typical(chunks: Sequence[ModelCosts]) -> ModelCosts:
    """The costs of a chunk that stands for all of a row: the bytes of the chunk that keeps most, and the mean time."""
    # Among equally long chunks it is the last, which attends to the most tokens.
    most = max(reversed(chunks), key=lambda chunk: sum(layer.plain.saved_bytes for layer in chunk.layers))
    if len(chunks) == 1:
        return most
    layers = [
        replace(
            layer,
            forward=_mean(layer.forward, [own.forward for own in same]),
            backward=_mean(layer.backward, [own.backward for own in same]),
            seconds=mean_seconds(own.seconds for own in same),
        )
        for layer, *same in zip(most.layers, *(chunk.layers for chunk in chunks), strict=True)
    ]
    return replace(most, layers=tuple(layers), stage_seconds=mean_seconds(chunk.stage_seconds for chunk in chunks))


def _mean(most: Operations, operations: Sequence[Operations]) -> Operations:
    """The mean of what the operations compute and move, with the calls and sums of `most`."""
    return most._replace(
        flops=round(fmean(own.flops for own in operations)), moved=round(fmean(own.moved for own in operations))
    )
