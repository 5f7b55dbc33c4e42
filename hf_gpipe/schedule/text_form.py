"""The text form of a table, which people read, compare and edit.

This is the table of GPipe with two stages, two micro-batches and recomputation:

    table: 10
    schedule: gpipe
    num_stages: 2
    num_micro_batches: 2
    placement: 0 1
    process 0: 0F0 0F1 0R1 0B1 0R0 0B0 0U
    process 1: 1F0 1F1 1R1 1B1 1R0 1B0 1U

The first line has the version of this text, so that a later version can say more; earlier versions are read too.
`schedule` is a name for people. `placement` gives the process of each stage, or the processes of its replicas with
commas: in `placement: 0,1 2` stage 0 has two replicas, on processes 0 and 1, and micro-batch m runs on replica m % 2. A
line `devices: cuda:0 cuda:1 cuda:0` follows where devices are given: one for each replica of each stage, in the order
of the placement. Each process runs its line from left to right and waits, at an action, for the message which that
action receives. A reduction (G) is not waited for where it stands: it goes on beside the next actions until U needs it.

A window has several steps, and each stage updates its weights after each of them (PipeDream, arXiv
1806.03377). A line `steps: 2 2 2` after the placement gives the number of micro-batches of each step. A word `2F7@3`
says that micro-batch 7 reads version 3 of stage 2's weights, in its forward, recomputation and backward: the weights
after three updates of this table. A forward without such a word reads the newest version. A line `stashes: no` after
the steps says that no old version is kept: recomputations and backwards then read the newest version too.

A line `chunks: 4` after the placement says that rows are cut into 4 chunks of tokens, and each chunk is a micro-batch
of the table: number m is chunk m % 4 of the rows m // 4. A stage runs a chunk's forward after that of the chunk before
it, and its backward after that of the chunk after it. All chunks of a row run on one replica of a stage; with r
replicas this is number (m // 4) % r.

Where weights visit their device (`hf_gpipe.modes.visits`), each run of a stage's actions stands between an L and a
D, which are numbered by the visits of the stage: `0L0 1L0 0F0 0F1 0D0 2L0 1F0 1F1 1D0`.

A line `dealt: yes` after the placement says that weights are in CPU memory that the workers of a pipeline share. An
action of a micro-batch may then stand in the row of any of these workers, between an L and a D of its stage; all visits
of a stage are numbered together. The placement gives the worker that updates each stage. A recomputation on another
worker than its forward receives the stage's inputs from the stage before, as the forward does. Where the backwards of a
stage are in several visits, each visit adds to the gradients that the visit before has left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from hf_gpipe.errors import ScheduleError, nearest
from hf_gpipe.schedule import groups
from hf_gpipe.schedule.actions import TEXT_VERSION, Action, parse_number
from hf_gpipe.schedule.kinds import FORWARD
from hf_gpipe.schedule.placement import Placement

MOST_ACTIONS = 600_000
"""The most actions of a table: of more, the checks alone would take minutes."""

_HEADER_KEYS = ("table", "schedule", "num_stages", "num_micro_batches", "placement")
_OPTIONAL_KEYS = (groups.KEY, "dealt", "steps", "stashes", "devices")

Table = TypeVar("Table")


def write_text(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    placement: Placement,
    actions: Sequence[Sequence[Action]],
    steps: Sequence[int] | None,
    versions: frozenset[tuple[int, int, int]],
    stashes: bool,
) -> str:
    """The text of a table with these fields."""
    lines = [
        f"table: {TEXT_VERSION}",
        f"schedule: {name}",
        f"num_stages: {num_stages}",
        f"num_micro_batches: {num_micro_batches}",
        f"placement: {placement}",
    ]
    if placement.group_size > 1:
        lines.append(f"{groups.KEY}: {placement.group_size}")
    if placement.is_shared:
        lines.append("dealt: yes")
    if steps is not None:
        lines.append(f"steps: {' '.join(map(str, steps))}")
    if not stashes:
        lines.append("stashes: no")
    if placement.devices is not None:
        lines.append(f"devices: {' '.join(placement.devices)}")
    named = {(stage, micro_batch): f"@{version}" for stage, micro_batch, version in versions}
    for process, row in enumerate(actions):
        words = [
            f"{action}{named.get((action.stage, action.micro_batch or 0), '') if action.kind == FORWARD else ''}"
            for action in row
        ]
        lines.append(f"process {process}: {' '.join(words)}".rstrip())
    return "\n".join(lines) + "\n"


def read_text(text: str, make: Callable[..., Table]) -> Table:
    """Read a table. Its lines are in the order of `write_text`; blank lines and spaces between words do not matter.

    Args:
        text: the text.
        make: makes the table of the fields, in the order of the arguments of `write_text`.

    Raises:
        ScheduleError: begins with the number of the line that is wrong, or says which one is missing.
    """
    header: dict[str, str] = {}
    actions: list[tuple[Action, ...]] = []
    versions: set[tuple[int, int, int]] = set()
    places: dict[str, int] = {}
    num_actions = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        key, colon, value = (part.strip() for part in line.partition(":"))
        try:
            expected = _expected(header, len(actions))
            if key not in expected or not colon:
                raise ScheduleError(
                    f"found {_shown(line)}, expected a line that starts with "
                    f"{' or '.join(f'{name}:' for name in expected)}{nearest(key, expected)}"
                )
            if key.startswith("process "):
                words = value.split()
                num_actions += len(words)
                if num_actions > MOST_ACTIONS:
                    raise ScheduleError(f"the table has more than {MOST_ACTIONS} actions; let it have fewer.")
                actions.append(tuple(_parse(word, versions) for word in words))
            else:
                header[key] = value
                _check_version(header)
        except ScheduleError as error:
            raise ScheduleError(f"line {number}: {error}", key) from None
        places[key] = number
    if missing := [key for key in _HEADER_KEYS if key not in header]:
        raise ScheduleError(f"the line '{missing[0]}:' is missing; a table has it after the lines above it.")

    def fail(key: str, expected: str) -> NoReturn:
        raise ScheduleError(
            f"line {places[key]}: {key}: found {_shown(header[key])}, expected {expected} (version {TEXT_VERSION} "
            "of the text has no more).",
            key,
        )

    def read(key: str) -> int:
        if (number := parse_number(header[key])) is None:
            fail(key, "one number")
        return number

    def read_workers() -> list[tuple[int, ...]]:
        every = []
        for word in header["placement"].split():
            own = [parse_number(part) for part in word.split(",")]
            every.append(tuple(number for number in own if number is not None))
            if len(every[-1]) < len(own):
                fail("placement", "one process for each stage, as in 0 0 1, or its replicas with commas, as in 0,1 2")
        return every

    def read_steps() -> tuple[int, ...] | None:
        if "steps" not in header:
            return None
        sizes = [parse_number(word) for word in header["steps"].split()]
        if None in sizes or not sizes:
            fail("steps", "the number of micro-batches of each step, as in 2 2 2")
        return tuple(size for size in sizes if size is not None)

    num_stages, num_micro_batches, steps = read("num_stages"), read("num_micro_batches"), read_steps()
    if header.get("stashes", "no") != "no":
        fail("stashes", "no, or no such line")
    if header.get("dealt", "yes") != "yes":
        fail("dealt", "yes, or no such line")
    devices = tuple(header["devices"].split()) if "devices" in header else None
    group_size = read(groups.KEY) if groups.KEY in header else 1
    try:
        placement = Placement(read_workers(), devices, group_size, is_shared="dealt" in header)
    except ScheduleError as error:
        raise error if error.line else ScheduleError(f"line {places['placement']}: {error}", "placement") from None
    try:
        return make(
            header["schedule"],
            num_stages,
            num_micro_batches,
            placement,
            tuple(actions),
            steps,
            frozenset(versions),
            stashes="stashes" not in header,
        )
    except ScheduleError as error:
        raise ScheduleError(f"line {places['schedule']}: {error}", "schedule") from None


def _parse(word: str, versions: set[tuple[int, int, int]]) -> Action:
    """An action; the version that a forward names is added to `versions`."""
    text, at, number = word.partition("@")
    action = Action.parse(text)
    if not at:
        return action
    version = parse_number(number)
    if version is None or action.kind != FORWARD or action.micro_batch is None:
        raise ScheduleError(
            f"{word!r}: a forward alone names the version of the weights that its micro-batch reads, as in 2F7@3."
        )
    versions.add((action.stage, action.micro_batch, version))
    return action


def _expected(header: dict[str, str], num_processes: int) -> list[str]:
    """How the next line of a table may begin."""
    process = f"process {num_processes}"
    if num_processes:
        return [process]
    if missing := [key for key in _HEADER_KEYS if key not in header]:
        return missing[:1]
    first = max((place for place, key in enumerate(_OPTIONAL_KEYS, 1) if key in header), default=0)
    return [*_OPTIONAL_KEYS[first:], process]


def _check_version(header: dict[str, str]) -> None:
    versions = [str(version) for version in range(1, TEXT_VERSION + 1)]
    if header["table"] not in versions:
        raise ScheduleError(
            f"the table's text is of version {_shown(header['table'])}, and this version of hf_gpipe reads versions "
            f"{', '.join(versions[:-1])} and {versions[-1]}; write table: {TEXT_VERSION}, and what that version has."
        )


def _shown(text: str) -> str:
    """A line in a message."""
    text = text.strip()
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
