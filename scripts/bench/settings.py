"""The comparisons: the settings, their cases, and the pairs of cases whose ratios are told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench.contenders import Options
from bench.work import Work


@dataclass(frozen=True)
class Case:
    """A contender and how it works, under the name that the tables show."""

    name: str
    contender: str
    options: Options = field(default_factory=Options)


class Pair(NamedTuple):
    """Two cases, by their names, of which the first one's speed and memory are told over the second one's.

    With `bubble_of`, M, the second one has no bubble and is allowed a pipeline's: its speed counts M / (M + 1) times.
    """

    case: str
    over: str
    bubble_of: int | None = None

    def text(self) -> str:
        allowance = f" x {self.bubble_of}/{self.bubble_of + 1}" if self.bubble_of else ""
        return f"{self.case} over {self.over}{allowance}"


@dataclass(frozen=True)
class Setting:
    """Work, and the cases that do it."""

    name: str
    title: str
    work: Work
    cases: tuple[Case, ...]
    pairs: tuple[Pair, ...] = ()


# Blocks: an unrecomputed head costs about 1.75 blocks. Where every stage recomputes, a block costs a third more and the
# head, which the peers do not recompute, does not; where only the first stage does, it takes fewer blocks.

_PLAIN = (Case("single", "single"), Case("twin", "twin"), Case("DDP", "ddp"))
_PLAIN_ON = tuple(Case(case.name, case.contender, Options("on")) for case in _PLAIN)


def _torch(recompute: str, schedule: str, blocks: tuple[int, ...], **values: Any) -> Case:
    return Case(f"torch {schedule}", "torch", Options(recompute, schedule, blocks, **values))


def _peers(recompute: str, blocks: tuple[int, ...]) -> tuple[Case, ...]:
    others = (Case(name, name.lower(), Options(recompute, blocks=blocks)) for name in ("DeepSpeed", "torchgpipe"))
    return (_torch(recompute, "ScheduleGPipe", blocks), _torch(recompute, "Schedule1F1B", blocks), *others)


def _ours(recompute: str, schedule: str, blocks: tuple[int, ...], *, length_bucketing: bool = False) -> Case:
    name = f"ours {schedule} {recompute}" + (" bucketed" if length_bucketing else "")
    return Case(name, "ours", Options(recompute, schedule, blocks, length_bucketing))


def _cut(partition: str) -> Case:
    """Cut by one of ours' strategies."""
    return Case(f"ours by {partition}", "ours", Options("none", "1f1b", partition=partition))


def _auto(peak_megabytes: int) -> Case:
    """The planner cuts and chooses what is recomputed, for a process that may grow to this."""
    return Case(f"ours auto {peak_megabytes} MB", "ours", Options("auto", "1f1b", peak_bytes=peak_megabytes * 10**6))


def _v_shaped(contender: str, schedule: str) -> Case:
    """Two stages a process. The first process has the embedding and the head."""
    name = f"{contender} {schedule}" + (" none" if contender == "ours" else "")
    return Case(name, contender, Options("none", schedule, blocks=(2, 3, 2, 1), is_v_shaped=True))


def _replicated(num_stages: int, *, zero: bool = False) -> Case:
    """Two pipelines of one stage or of two."""
    blocks = (_STANDARD.layers,) if num_stages == 1 else (5, 3)
    options = Options("none", "1f1b", blocks=blocks, replicas=2, zero=zero)
    return Case(f"ours 2 x {num_stages}" + (" zero 1" if zero else ""), "ours", options)


_STANDARD = Work()
_STAGE = "ours 1f1b stage"

SETTINGS = (
    Setting(
        "off",
        "8 layers, 16 x 128 tokens, M = 8, nothing recomputed",
        _STANDARD,
        (*_PLAIN, *_peers("none", (5, 3)), *(_ours("none", name, (5, 3)) for name in ("1f1b", "gpipe_fused", "gpipe"))),
        (Pair("ours 1f1b none", "torch Schedule1F1B"), Pair("ours 1f1b none", "twin", bubble_of=8)),
    ),
    Setting(
        "on",
        "8 layers, 16 x 128 tokens, M = 8, recomputed",
        _STANDARD,
        (
            *(*_PLAIN_ON, *_peers("on", (5, 3)), _ours("stage", "1f1b", (4, 4)), _ours("stage", "gpipe_fused", (4, 4))),
            # The last two: what torch's larger process grows to, under ScheduleGPipe and under Schedule1F1B.
            *(_ours("stage", "gpipe", (5, 3)), _ours("none", "1f1b", (5, 3)), _auto(770), _auto(660)),
        ),
        (
            *(Pair(case, "torch ScheduleGPipe") for case in ("ours auto 770 MB", "ours 1f1b none", _STAGE)),
            *(Pair(case, "torch Schedule1F1B") for case in ("ours auto 660 MB", _STAGE)),
        ),
    ),
    Setting(
        "deep",
        "12 layers, 32 x 128 tokens, M = 32, recomputed",
        Work(layers=12, rows=32, micro_batches=32, steps=2),
        (
            *(
                *_PLAIN_ON[:2],
                *_peers("on", (7, 5))[:2],
                _ours("stage", "1f1b", (6, 6)),
                _ours("stage", "gpipe_fused", (6, 6)),
            ),
            # As above: torch's larger process under either schedule.
            *(_ours("none", "1f1b", (7, 5)), _auto(1105), _auto(706)),
        ),
        (
            *(Pair(case, "torch ScheduleGPipe") for case in ("ours auto 1105 MB", _STAGE)),
            *(Pair(case, "torch Schedule1F1B") for case in ("ours auto 706 MB", _STAGE)),
        ),
    ),
    Setting(
        "lengths",
        "8 layers, 16 rows of 16 to 128 tokens, M = 8, nothing recomputed",
        Work(random_lengths=True),
        (
            *(_PLAIN[0], _torch("none", "Schedule1F1B", (5, 3)), _ours("none", "1f1b", (5, 3))),
            _ours("none", "1f1b", (5, 3), length_bucketing=True),
        ),
        (Pair("ours 1f1b none bucketed", "ours 1f1b none"),),
    ),
    Setting(
        "head",
        "8 layers, vocabulary 32768, 16 x 128 tokens, M = 8, nothing recomputed",
        Work(vocabulary=32768, steps=2),
        (_PLAIN[0], _cut("count"), _cut("flops"), _cut("profile")),
        (Pair("ours by flops", "ours by count"), Pair("ours by profile", "ours by count")),
    ),
    Setting(
        "zero_bubble",
        "8 layers, 16 x 128 tokens, M = 8, nothing recomputed; gradients of inputs and weights apart",
        _STANDARD,
        (
            *(*_PLAIN[:2], _torch("none", "Schedule1F1B", (5, 3))),
            Case("torch ZB1P", "torch", Options("none", "ScheduleInterleavedZeroBubble", (5, 3))),
            _v_shaped("torch", "ScheduleZBVZeroBubble"),
            *(_ours("none", schedule, (5, 3)) for schedule in ("1f1b", "zb_h1", "zb_h2")),
            *(_v_shaped("ours", schedule) for schedule in ("zb_v", "v_half")),
        ),
        (
            Pair("ours zb_h1 none", "twin"),
            Pair("ours zb_h1 none", "ours 1f1b none"),
            Pair("ours zb_h1 none", "torch ZB1P"),
            *(Pair(f"ours {schedule} none", "torch ScheduleZBVZeroBubble") for schedule in ("zb_h1", "zb_v")),
        ),
    ),
    Setting(
        "pipedream",
        "8 layers, a window of 128 updates of 2 x 128 tokens, M = 1, nothing recomputed",
        Work(rows=2, micro_batches=1, updates=128, steps=1),
        (*_PLAIN[:2], *(_ours("none", schedule, (5, 3)) for schedule in ("pipedream", "pipedream_vertical"))),
        (Pair("ours pipedream none", "twin"),),
    ),
    Setting(
        "mesh",
        "8 layers, 16 x 128 tokens, M = 8, nothing recomputed; two replicas of one stage or of two",
        _STANDARD,
        (
            *(*_PLAIN, _replicated(1), _replicated(1, zero=True)),
            Case("torch DDP x Schedule1F1B", "torch", Options("none", "Schedule1F1B", (5, 3), replicas=2)),
            Case("DeepSpeed 2 x 2 ZeRO-1", "deepspeed", Options(blocks=(5, 3), replicas=2, zero=True)),
            *(_replicated(2), _replicated(2, zero=True)),
        ),
        # Four processes on two cores: their loss is compared, not their speed.
        (Pair("ours 2 x 1", "DDP"),),
    ),
)
