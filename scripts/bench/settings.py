"""The comparisons: the settings, their cases, and the target ratios of hf_gpipe."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from bench.contenders import Options
from bench.work import Work


@dataclass(frozen=True)
class Case:
    """A contender and how it works, under the name that the tables show."""

    name: str
    contender: str
    options: Options = field(default_factory=Options)


@dataclass(frozen=True)
class Claim:
    """That a case is at least so many times as fast as another.

    Attributes:
        case: name of the faster one.
        over: name of the other one.
        at_least: the ratio of their speeds.
        bubble_of: M where the other one has no bubble and is allowed a pipeline's: its speed counts M / (M + 1) times.
        memory_at_most: the ratio of the peaks of their largest processes.
    """

    case: str
    over: str
    at_least: float
    bubble_of: int | None = None
    memory_at_most: float | None = None

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
    claims: tuple[Claim, ...] = ()

    def tiny(self) -> Setting:
        """The same with a model that takes no time, to see that everything runs."""
        updates = min(self.work.updates, 3)
        work = replace(self.work, hidden=64, intermediate=64, vocabulary=128, tokens=24, steps=1, updates=updates)
        return replace(self, work=work, claims=())

    def with_splits(self, splits: list[int]) -> Setting:
        """Each case that has a split, once with every one of these."""
        cases = []
        for case in self.cases:
            if not case.options.split:
                cases.append(case)
                continue
            cases += [Case(f"{case.name} @{n}", case.contender, replace(case.options, split=n)) for n in splits]
        return replace(self, cases=tuple(cases), claims=())


# Splits: an unrecomputed head costs about 1.75 blocks. Where every stage recomputes, a block costs a third more and the
# head, which the peers do not recompute, does not; where only the first stage does, it takes fewer blocks.

_PLAIN = (Case("single", "single"), Case("twin", "twin"), Case("DDP", "ddp"))
_PLAIN_ON = tuple(Case(case.name, case.contender, Options("on")) for case in _PLAIN)


def _peers(recompute: str, split: int) -> tuple[Case, ...]:
    return (
        Case("torch ScheduleGPipe", "torch", Options(recompute, "ScheduleGPipe", split)),
        Case("torch Schedule1F1B", "torch", Options(recompute, "Schedule1F1B", split)),
        Case("DeepSpeed", "deepspeed", Options(recompute, split=split)),
        Case("torchgpipe", "torchgpipe", Options(recompute, split=split)),
    )


def _ours(recompute: str, schedule: str, split: int, *, length_bucketing: bool = False) -> Case:
    name = f"ours {schedule} {recompute}" + (" bucketed" if length_bucketing else "")
    return Case(name, "ours", Options(recompute, schedule, split, length_bucketing))


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
_DEEP = Work(layers=12, rows=32, micro_batches=32, steps=2)
_LENGTHS = Work(random_lengths=True)
_HEAD = Work(vocabulary=32768, steps=2)
_WINDOW = Work(rows=2, micro_batches=1, updates=128, steps=1)

SETTINGS = (
    Setting(
        "off",
        "8 layers, 16 x 128 tokens, M = 8, nothing recomputed",
        _STANDARD,
        (
            *_PLAIN,
            *_peers("none", 5),
            _ours("none", "1f1b", 5),
            _ours("none", "gpipe_fused", 5),
            _ours("none", "gpipe", 5),
        ),
        (
            Claim("ours 1f1b none", "torch Schedule1F1B", 0.95, memory_at_most=1.03),
            Claim("ours 1f1b none", "twin", 0.93, bubble_of=8),
        ),
    ),
    Setting(
        "on",
        "8 layers, 16 x 128 tokens, M = 8, recomputed",
        _STANDARD,
        (
            *_PLAIN_ON,
            *_peers("on", 5),
            _ours("stage", "1f1b", 4),
            _ours("stage", "gpipe_fused", 4),
            _ours("stage", "gpipe", 5),
            _ours("none", "1f1b", 5),
            # What torch's larger process grows to, under ScheduleGPipe and under Schedule1F1B.
            _auto(770),
            _auto(660),
        ),
        (
            Claim("ours auto 770 MB", "torch ScheduleGPipe", 1.25, memory_at_most=1.03),
            Claim("ours auto 660 MB", "torch Schedule1F1B", 1.20, memory_at_most=1.03),
            Claim("ours 1f1b none", "torch ScheduleGPipe", 1.25, memory_at_most=1.03),
            Claim("ours 1f1b stage", "torch ScheduleGPipe", 1.25, memory_at_most=1.03),
            Claim("ours 1f1b stage", "torch Schedule1F1B", 1.20, memory_at_most=1.03),
        ),
    ),
    Setting(
        "deep",
        "12 layers, 32 x 128 tokens, M = 32, recomputed",
        _DEEP,
        (
            *_PLAIN_ON[:2],
            *_peers("on", 7)[:2],
            _ours("stage", "1f1b", 6),
            _ours("stage", "gpipe_fused", 6),
            _ours("none", "1f1b", 7),
            # As above: torch's larger process under either schedule.
            _auto(1105),
            _auto(706),
        ),
        (
            Claim("ours auto 1105 MB", "torch ScheduleGPipe", 1.25, memory_at_most=1.03),
            Claim("ours auto 706 MB", "torch Schedule1F1B", 1.20, memory_at_most=1.03),
            Claim("ours 1f1b stage", "torch ScheduleGPipe", 1.25, memory_at_most=1.03),
            Claim("ours 1f1b stage", "torch Schedule1F1B", 1.20, memory_at_most=1.03),
        ),
    ),
    Setting(
        "lengths",
        "8 layers, 16 rows of 16 to 128 tokens, M = 8, nothing recomputed",
        _LENGTHS,
        (
            Case("single", "single"),
            Case("torch Schedule1F1B", "torch", Options("none", "Schedule1F1B", 5)),
            _ours("none", "1f1b", 5),
            _ours("none", "1f1b", 5, length_bucketing=True),
        ),
        (Claim("ours 1f1b none bucketed", "ours 1f1b none", 1.15),),
    ),
    Setting(
        "head",
        "8 layers, vocabulary 32768, 16 x 128 tokens, M = 8, nothing recomputed",
        _HEAD,
        (Case("single", "single"), _cut("count"), _cut("flops"), _cut("profile")),
        (Claim("ours by flops", "ours by count", 1.0), Claim("ours by profile", "ours by count", 1.0)),
    ),
    Setting(
        "zero_bubble",
        "8 layers, 16 x 128 tokens, M = 8, nothing recomputed; gradients of inputs and weights apart",
        _STANDARD,
        (
            *_PLAIN[:2],
            *_peers("none", 5)[1:2],
            Case("torch ZB1P", "torch", Options("none", "ScheduleInterleavedZeroBubble", 5)),
            _v_shaped("torch", "ScheduleZBVZeroBubble"),
            *(_ours("none", schedule, 5) for schedule in ("1f1b", "zb_h1", "zb_h2")),
            *(_v_shaped("ours", schedule) for schedule in ("zb_v", "v_half")),
        ),
        (
            Claim("ours zb_h1 none", "twin", 0.93),
            Claim("ours zb_h1 none", "ours 1f1b none", 1.0, memory_at_most=1.05),
            Claim("ours zb_h1 none", "torch ZB1P", 1.10),
            Claim("ours zb_h1 none", "torch ScheduleZBVZeroBubble", 1.10),
            Claim("ours zb_v none", "torch ScheduleZBVZeroBubble", 1.10),
        ),
    ),
    Setting(
        "pipedream",
        "8 layers, a window of 128 updates of 2 x 128 tokens, M = 1, nothing recomputed",
        _WINDOW,
        (*_PLAIN[:2], *(_ours("none", schedule, 5) for schedule in ("pipedream", "pipedream_vertical"))),
        (Claim("ours pipedream none", "twin", 0.97),),
    ),
    Setting(
        "mesh",
        "8 layers, 16 x 128 tokens, M = 8, nothing recomputed; two replicas of one stage or of two",
        _STANDARD,
        (
            *_PLAIN,
            _replicated(1),
            _replicated(1, zero=True),
            Case("torch DDP x Schedule1F1B", "torch", Options("none", "Schedule1F1B", 5, replicas=2)),
            Case("DeepSpeed 2 x 2 ZeRO-1", "deepspeed", Options(split=5, replicas=2, zero=True)),
            _replicated(2),
            _replicated(2, zero=True),
        ),
        # Four processes on two cores: their loss is compared, not their speed.
        (Claim("ours 2 x 1", "DDP", 0.97),),
    ),
)
