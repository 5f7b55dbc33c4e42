"""Draw a case: a family, changes of its configuration, how it is cut and run, and a mini-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_gpipe.adapters.families import EXACT, REFUSED
from hf_gpipe.schedule import Action, Placement, Schedule, kinds
from scripts.families import architectures

#: Those of which every number of stages fits into one process; zb_v and v_half want two stages.
SCHEDULES = ("gpipe", "gpipe_fused", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "naive")
V_SHAPED = ("zb_v", "v_half")
#: The options that turn on each mode that one process can have; a case has up to three, beside its other options.
#: "teacher" has a loss too (`run.py`), and chunks are drawn with the rows.
MODES: dict[str, dict[str, Any]] = {
    "visits": {"schedule": "breadth_first", "offload_weights": "all"},
    "frozen visits": {"schedule": "breadth_first", "offload_weights": "frozen"},
    "some stay": {"schedule": "breadth_first", "offload_weights": "all", "resident_stages": 2},
    "dealt stages": {"schedule": "round_robin", "offload_weights": "all"},
    "host graphs": {"recompute": "host"},
    "divided head": {"schedule": "vocab_1f1b"},
    "compiled": {"torch_compile": "aot_eager"},
    "teacher": {},
}
#: Fewer stages could not visit where one process has all of them.
_VISITING_STAGES = 5


@dataclass(frozen=True)
class Case:
    """One random case. Each field has a plain value, to which a wrong case is reduced as far as it stays wrong.

    Attributes:
        seed, number: what it was drawn from.
        family: the `model_type`.
        changes: dotted names of the configuration's fields and their values, after it was made tiny.
        num_stages: K, at most the number of layers.
        num_micro_batches: M.
        schedule: the name of a builder's, or "table": one with a random order of actions.
        recompute: as of `Pipeline`; of a random table, whether it has recomputations.
        cut: seed of a random partition; None: by count.
        attention: of the plain model and of the stages.
        padding: "none", "right", "left" or "both", which is different from row to row.
        rows: of each accumulated mini-batch.
        packing, length_bucketing, label_smoothing: as of `Pipeline`.
        dropout: of every kind that the configuration has; then a pipeline of one stage is the reference.
        frozen: seed of what is not trained; None: everything is.
        lora: whether adapters are trained.
        sequence_chunks, chunk_taper: as of `Pipeline`; a random table cuts no rows.
        modes: names in `MODES`; where two of them have one option, the last one's.
        extras: whether the mini-batches have position_ids that leave padding out, or for a decoder with an encoder a
            mask of its own.
    """

    seed: int
    number: int
    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    num_stages: int = 2
    num_micro_batches: int = 1
    schedule: str = "gpipe"
    recompute: str | tuple[str | int, ...] = "none"
    cut: int | None = None
    attention: str = "eager"
    padding: str = "right"
    rows: tuple[int, ...] = (4,)
    packing: bool = False
    length_bucketing: bool = False
    label_smoothing: float = 0.0
    dropout: float = 0.0
    frozen: int | None = None
    lora: bool = False
    extras: bool = False
    sequence_chunks: int = 1
    chunk_taper: float = 0.0
    modes: tuple[str, ...] = ()

    @property
    def mode_options(self) -> dict[str, Any]:
        """The options of its modes, for `Pipeline`."""
        return {name: value for mode in self.modes for name, value in MODES[mode].items()}

    def __str__(self) -> str:
        """The options that are not plain, in one line."""
        plain = Case(0, 0, "")
        options = [option.name for option in fields(self) if option.name not in ("seed", "number", "family", "changes")]
        odd = {name: getattr(self, name) for name in options if getattr(self, name) != getattr(plain, name)}
        return " ".join([self.family, *(f"{name}={value!r}" for name, value in {**self.changes, **odd}.items())])

    def simpler(self) -> Iterator[Case]:
        """The cases with one thing less that is odd."""
        for name in self.changes:
            yield replace(self, changes={key: value for key, value in self.changes.items() if key != name})
        plain = Case(0, 0, "")
        for mode in self.modes if len(self.modes) > 1 else ():
            yield replace(self, modes=tuple(other for other in self.modes if other != mode))
        if self.chunk_taper:
            yield replace(self, chunk_taper=0.0)
        apart = ("seed", "number", "family", "changes", "num_stages", "num_micro_batches", "rows")
        for name in reversed([option.name for option in fields(self) if option.name not in apart]):
            if getattr(self, name) != getattr(plain, name):
                is_list = name == "schedule" and isinstance(self.recompute, tuple)
                also = {"recompute": "none"} if is_list else {"chunk_taper": 0.0} if name == "sequence_chunks" else {}
                yield replace(self, **{name: getattr(plain, name)} | also)
        if len(self.rows) > 1:
            yield replace(self, rows=self.rows[:1])
        if self.rows[0] > 1:
            yield replace(self, rows=(self.rows[0] - 1, *self.rows[1:]))
        if self.num_micro_batches > 1:
            yield replace(self, num_micro_batches=self.num_micro_batches - 1)
        if self.num_stages > 1 and self.schedule not in V_SHAPED:
            kept = self.recompute[1:] if isinstance(self.recompute, tuple) else self.recompute
            yield replace(self, num_stages=self.num_stages - 1, recompute=kept)


def families() -> tuple[str, ...]:
    """The families whose split is known to be exact, and now and then another one of transformers."""
    others = tuple(name for name in architectures() if name not in REFUSED and name not in EXACT)
    return (*sorted(EXACT), *others[::4])


def draw(seed: int, number: int, names: tuple[str, ...]) -> tuple[Case, Random]:
    """Draw a case without changes of its configuration, and the generator with which they are to be drawn."""
    rng = Random(f"{seed}/{number}")
    family = rng.choice(names)
    schedule = rng.choice((*SCHEDULES, *V_SHAPED, "table", "table"))
    num_stages = 2 if schedule in V_SHAPED else rng.randint(1, 5)
    recompute: Any = rng.choice(["none", "block", "stage", "list"])
    if schedule == "table":
        recompute = rng.choice(["none", "stage"])
    elif recompute == "list":
        recompute = tuple(rng.choice(["none", "block", "stage", 1, 2]) for _ in range(num_stages))
    packing = rng.random() < 0.2
    can_cut = schedule != "table" and family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    sequence_chunks = rng.choice([1, 1, 1, 2, 3, 5]) if can_cut else 1
    # By a generator of its own: a case without modes is that of earlier versions.
    of_modes = Random(f"{seed}/{number}/modes")
    modes = tuple(of_modes.sample([*MODES], of_modes.choice([0, 0, 0, 1, 2, 3])))
    if any("offload_weights" in MODES[mode] for mode in modes):
        num_stages = _VISITING_STAGES
        recompute = "stage" if "dealt stages" in modes or not isinstance(recompute, str) else recompute
    # What they refuse is known, and would hide what else they meet.
    packing &= "teacher" not in modes
    return (
        Case(
            seed,
            number,
            family,
            num_stages=num_stages,
            num_micro_batches=rng.randint(1, 6),
            schedule=schedule,
            recompute=recompute,
            cut=rng.choice([None, rng.randrange(1000)]),
            attention=rng.choice(["eager", "sdpa"]),
            padding=rng.choice(["none", "right", "right", "left", "both"][: 4 if packing else 5]),
            rows=tuple(rng.randint(1, 6) for _ in range(rng.choice([1, 1, 1, 2, 3]))),
            packing=packing,
            length_bucketing=not packing and rng.random() < 0.2,
            label_smoothing=rng.choice([0.0, 0.0, 0.0, 0.1]) * ("teacher" not in modes),
            dropout=rng.choice([0.0] * 9 + [0.1]) if not packing else 0.0,
            frozen=rng.randrange(1000) if rng.random() < 0.15 else None,
            lora=rng.random() < 0.1,
            extras=rng.random() < 0.15,
            sequence_chunks=sequence_chunks,
            chunk_taper=rng.choice([0.0, 2.0]) if sequence_chunks > 1 else 0.0,
            modes=modes,
        ),
        rng,
    )


def random_table(num_stages: int, num_micro_batches: int, rng: Random, *, recomputes: bool) -> Schedule:
    """A valid table for one process: its actions in any order in which each has what it needs."""
    pairs = [(stage, m) for stage in range(num_stages) for m in range(num_micro_batches)]
    split = frozenset(pair for pair in pairs if rng.random() < 0.3)
    again = {pair for pair in pairs if recomputes and rng.random() < 0.6}
    needs: dict[Action, list[Action]] = {}
    for stage, m in pairs:
        forward = Action(kinds.FORWARD, stage, m)
        needs[forward] = [Action(kinds.FORWARD, stage - 1, m)] if stage else []
        first = forward
        if (stage, m) in again:
            first = Action(kinds.RECOMPUTE, stage, m)
            needs[first] = [forward]
        back = Action(kinds.INPUT if (stage, m) in split else kinds.BACKWARD, stage, m)
        later = [Action(kinds.INPUT if (stage + 1, m) in split else kinds.BACKWARD, stage + 1, m)]
        needs[back] = [first, *(later if stage + 1 < num_stages else [])]
        if (stage, m) in split:
            needs[Action(kinds.WEIGHT, stage, m)] = [back]
    order: list[Action] = []
    while waiting := [action for action in needs if action not in order]:
        ready = [action for action in waiting if all(before in order for before in needs[action])]
        order.append(rng.choice(ready))
    updates = [Action(kinds.UPDATE, stage) for stage in range(num_stages)]
    rng.shuffle(updates)
    return Schedule("random", num_stages, num_micro_batches, Placement.spread(num_stages, 1), ((*order, *updates),))
