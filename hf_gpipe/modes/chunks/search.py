"""The ways to cut rows into chunks that are tried where a configuration leaves them open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hf_gpipe.modes.chunks.key import CHUNK_UNIT, SETTING
from hf_gpipe.planner.costs.stage_costs import StageCosts
from hf_gpipe.planner.plan import Planner
from hf_gpipe.schedule.groups import Groups
from hf_gpipe.settings.mode import AUTO
from hf_gpipe.settings.pipeline import DecidedConfig, PipelineConfig

#: The most chunks and the fewest tokens of a chunk where "auto" cuts rows, into powers of two: shorter products waste
#: a device.
MOST_CHUNKS, SHORTEST_CHUNK = 64, 256


def longer_rows(config: DecidedConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the keys with which rows that are whole are cut, so that longer ones fit."""
    if not config.cuts_rows:
        yield "in chunks", {SETTING: f"2048{CHUNK_UNIT}", "schedule": "1f1b", "recompute": "stage"}


def ways(planner: Planner, config: PipelineConfig) -> Iterator[tuple[Planner, PipelineConfig]]:
    """Yield the configuration with its chunks decided, and the planner for them."""
    for cut in cuts(config, planner.inputs.mini_batch().target_tokens):
        tapers = [cut.taper]
        if config.chunks.chunk_taper == AUTO and cut.size > 1:
            # The taper is for the longest rows, whatever M is.
            equal = planner.with_groups(cut._replace(taper=0.0))
            tapers = sorted({cut.taper, taper_of(equal.member_sums(planner.rows))})
        for groups in (cut._replace(taper=taper) for taper in tapers):
            yield planner.with_groups(groups), config.replace(sequence_chunks=groups.size, chunk_taper=groups.taper)


def cuts(config: PipelineConfig, tokens: int) -> list[Groups]:
    """The ways to cut rows of so many tokens that a configuration allows; "auto" allows powers of two. An open taper
    is 0 in them."""
    number, longest, taper = config.chunks.sequence_chunks, config.chunks.most_tokens, config.groups.taper
    counts = [number] if isinstance(number, int) else [-(-tokens // longest)] if longest is not None else []
    limit = min(MOST_CHUNKS, max(tokens // SHORTEST_CHUNK, 1))
    counts = counts or [2**power for power in range(limit.bit_length())]
    return [Groups(count, taper if count > 1 else 0.0) for count in counts]


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
