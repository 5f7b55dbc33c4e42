"""`PipelineConfig`: how a model is cut into stages and run, the same object from the recipe to the `Pipeline`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hf_gpipe.errors import UserError
from hf_gpipe.schedule import (
    Schedule,
    is_table_file,
    read_table,
    recompute_under,
    replicas_of,
    training_schedules,
)
from hf_gpipe.schedule.groups import Groups
from hf_gpipe.settings.mesh import (
    MeshConfig,
    Recomputation,
    Recomputations,
    ScheduleName,
    TableFile,
)
from hf_gpipe.settings.mode import AUTO, EACH_PROCESS, RUN, Listed, Mode, with_modes
from hf_gpipe.settings.schedules import CompiledBlocks, LigerKernels, NarrowBoundary
from hf_gpipe.settings.section import Count, Positive, Text, keys_of
from hf_gpipe.settings.sizes import read_bytes
from hf_gpipe.settings.words import choices

#: About thirty years: longer times are none to a clock.
Seconds = Annotated[float, Field(gt=0, le=10**9)]
#: More than the cores of any machine. With a hundred thousand torch ends the process by a segmentation fault.
MOST_THREADS = 4096

#: What the planner chooses where it is not given, and what it is where nothing can be planned.
PLANNED = {"num_micro_batches": 1, "schedule": "gpipe", "recompute": "stage", "partition": "count"}

if TYPE_CHECKING:
    _WithModes = MeshConfig
else:
    _WithModes = with_modes(MeshConfig)


class PipelineConfig(_WithModes):
    """How the model is split into stages, and how micro-batches go through them.

    The planner chooses the values that are "auto", and micro-batches, schedule, recomputation and
    partition where they are not given. All values can be written to a file.
    """

    boundary: NarrowBoundary = NarrowBoundary()

    memory: Annotated[Text | tuple[Text, ...] | None, Listed, EACH_PROCESS] = None
    """The memory limit of each process that the planner plans for, with a unit, such as 80GiB; or a list with one limit
    per process, such as [24GiB, 12GiB]; null: the memory of its device."""

    speeds: Annotated[tuple[Positive, ...] | Literal["profile"] | None, Listed, RUN] = None
    """The relative speed of each process, for the planner, such as [1, 0.5] if the second process is half as fast.
    profile: measured before training, by a block of the model. null: measured where the processes have GPUs of
    different models and something is left to the planner; otherwise all are equally fast."""

    device: Annotated[Literal["auto", "cpu", "cuda"], EACH_PROCESS] = "auto"
    """The type of device that stages run on; auto: GPUs if there are any."""

    devices: Annotated[tuple[Text, ...] | None, Listed, EACH_PROCESS] = None
    """Devices of this machine, divided evenly among the processes, such as [cuda:0, cuda:1]; a process spreads its
    stages over its devices. null: one device per process, of the type of `device`."""

    compiled: CompiledBlocks = CompiledBlocks()
    liger: LigerKernels = LigerKernels()

    timeout_seconds: Annotated[Seconds, RUN] = 1800.0
    """Seconds that a process waits for another process before the run fails; six times as long for a process that
    writes a checkpoint and reports that it is still working."""

    measure_links: Annotated[bool, RUN] = False
    """Whether the links between processes of one machine are measured before the model is made. Links between machines
    are always measured."""

    threads_per_process: Annotated[Annotated[int, Field(ge=1, le=MOST_THREADS)] | None, EACH_PROCESS] = None
    """CPU threads per process; null: OMP_NUM_THREADS, or the machine's cores divided evenly."""

    @classmethod
    def of(cls, config: PipelineConfig | None, **given: Any) -> PipelineConfig:
        """Make the configuration from the arguments of `Pipeline`: a configuration, or its keys.

        A key that is None is not given. A string as `torch_compile` is the backend, a number as `memory` is bytes.

        Raises:
            UserError: both are given, or a key does not fit.
        """
        if isinstance(backend := given.get("torch_compile"), str):
            given |= {"torch_compile": True, "torch_compile_backend": backend}
        if isinstance(memory := given.get("memory"), int):
            given["memory"] = f"{memory}B"
        given = {name: value for name, value in given.items() if value is not None}
        if config is None:
            return cls(**given)
        if given:
            raise UserError(f"config and {', '.join(given)} are given; put {next(iter(given))} into the config")
        return config

    @model_validator(mode="before")
    @classmethod
    def _in_modes(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Read the keys, which recipes and arguments have side by side, into their modes."""
        values = dict(given)
        for name, key in keys_of(cls).items():
            field, is_within, _ = key.path.partition(".")
            if is_within and name in given:
                mode = values.get(field, {})
                own = mode if isinstance(mode, dict) else mode.model_dump(by_alias=True)
                values[field] = {**own, name: values.pop(name)}
        return values

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if vars(self)["num_stages"] is None:
            vars(self)["num_stages"] = self.stages_of_processes()
        self.check_mesh()
        for name, of_processes in (("memory", self.memory), ("speeds", self.speeds)):
            if isinstance(of_processes, tuple) and self.num_processes not in (None, len(of_processes)):
                raise UserError(
                    f"{name} {list(of_processes)} has {len(of_processes)} entries and num_processes is "
                    f"{self.num_processes}; give one entry for each process."
                )
        self.memory_bytes  # noqa: B018  # raises for a text that is no size
        if self.devices == ():
            raise UserError("devices [] is empty; name at least one device, or leave it out.")
        keys = self.values()
        for field, mode in self.modes.items():
            mode.check(keys)
            # What the planner chooses goes with the others.
            if mode.is_on(keys) and AUTO not in mode.__dict__.values():
                for other in mode.excludes:
                    if other in self.modes and self.modes[other].is_on(keys):
                        self.check_beside(field, [other])
        return self

    if TYPE_CHECKING:

        def __init__(self, num_stages: int | str | None = None, /, *args: Any, **keys: Any) -> None: ...

        def __getattr__(self, name: str) -> Any:
            """A mode that the registry finds, or the value of a mode's key."""

    else:

        def __getattr__(self, name: str) -> Any:
            """The value of a mode's key."""
            key = keys_of(type(self)).get(name)
            return super().__getattr__(name) if key is None else key.value_in(self)

    def values(self) -> dict[str, Any]:
        """The value of every key, those of modes among them."""
        return {name: key.value_in(self) for name, key in keys_of(type(self)).items()}

    # ------------------------------------------------------------------ modes

    @property
    def cuts_rows(self) -> bool:
        """Whether rows are cut into groups of micro-batches, or may be."""
        return self._has_mode("cuts_rows")

    @property
    def groups(self) -> Groups:
        """The groups that micro-batches are cut into, where that is not left to the planner."""
        return max(mode.groups for mode in self.modes.values())

    @property
    def shares_last_layer(self) -> bool:
        """Whether each stage has a part of the last layer."""
        return self._has_mode("shares_last_layer")

    def _has_mode(self, trait: str) -> bool:
        """Whether a mode with a trait is on, or may be."""
        keys = self.values()
        return any(getattr(mode, trait) and mode.is_on(keys) for mode in self.modes.values())

    @property
    def modes(self) -> dict[str, Mode]:
        """The modes by their fields, also those that are not used."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Mode)}

    def excluding(self, other: str) -> list[str]:
        """The fields of the modes in use that do not go with another mode, or a loss."""
        keys = self.values()
        return [name for name, mode in self.modes.items() if self._why(name, other) is not None and mode.is_on(keys)]

    def _why(self, one: str, other: str) -> str | None:
        """Why two modes, or a mode and a loss, do not go together; None: they do."""
        of_other = self.modes[other].excludes if other in self.modes else {}
        return self.modes[one].excludes.get(other, of_other.get(one))

    def check_beside(self, other: str, names: Iterable[str] = (), **words: Any) -> None:
        """Raise UserError where a mode does not go with another mode, or a loss.

        Args:
            other: the field of the other mode, or what modes exclude besides.
            names: the fields of modes that are in use; by default those that the keys turn on.
            words: what a message says beside keys.
        """
        for name in names or self.excluding(other):
            why, keys = self._why(name, other), self.values()
            if why and not why.startswith(":"):
                raise UserError(
                    why.format(**{key: list(v) if isinstance(v, tuple) else v for key, v in keys.items()}, **words)
                )
            # Of two modes one has a key.
            named, beside = (
                self.modes[field] for field in ((name, other) if keys_of(type(self.modes[name])) else (other, name))
            )
            key = next(iter(keys_of(type(named))))
            raise UserError(
                f"{beside.in_use(keys)} and {key} is {str(keys[key]).lower()}, which do not go together{why}; leave "
                f"{key} out{beside.instead}."
            )

    # ------------------------------------------------------------------ what the planner chooses

    def with_defaults(self, *, can_plan: bool) -> Self:
        """A copy in which all that is not given is "auto", or where nothing can be planned the plain value of PLANNED.

        The planner chooses among synchronous schedules. With another one, or the file of a table, a plain value is
        taken too.

        Args:
            can_plan: whether the shape of a mini-batch and the memory of the optimizer are known.
        """
        keys, plain = self.values(), dict[str, Any]()
        for mode in self.modes.values():
            plain |= mode.plain(keys)
        is_auto = can_plan and not plain and self.schedule in (None, AUTO, *training_schedules())
        plain = PLANNED | plain
        values: dict[str, Any] = {name: AUTO if is_auto else plain[name] for name in self.not_given}
        return self.replace(**values) if values else self

    def resumed(self, num_micro_batches: int | None) -> Self:
        """A copy for a run that goes on: an open M is that of before, because dropout depends on the micro-batch."""
        is_open = self.num_micro_batches in (None, AUTO)
        return self.replace(num_micro_batches=num_micro_batches) if is_open and num_micro_batches is not None else self

    @property
    def not_given(self) -> list[str]:
        """The names of PLANNED that are not given."""
        return [name for name in PLANNED if getattr(self, name) is None]

    @property
    def left_open(self) -> list[str]:
        """The names of the keys whose value the planner chooses."""
        values, of_modes = self.values(), [name for mode in self.modes.values() for name in mode.left_open]
        return [name for name in _may_be_auto() if values[name] == AUTO or name in of_modes]

    @property
    def is_decided(self) -> bool:
        """Whether nothing is left to the planner."""
        return not (self.left_open or self.not_given or self.is_cut_by_cost)

    def with_auto(self, num_processes: int) -> PipelineConfig:
        """A copy that leaves all to the planner but how rows are cut, and what processes have and share."""
        kept = [name for mode in self.modes.values() if mode.cuts_rows for name in keys_of(type(mode))]
        values = dict.fromkeys((name for name in _may_be_auto() if name not in kept), AUTO)
        return PipelineConfig(**{**self.values(), **values, "placement": None, "num_processes": num_processes})

    def on_mesh(self, num_stages: int, replicas: int | tuple[int, ...], **values: Any) -> Self:
        """A copy with a mesh and other values. Without replicas nothing shares an update, so `zero` is 0."""
        zero = self.shared_updates.zero if max(replicas_of(num_stages, replicas)) > 1 else 0
        return self.replace(num_stages=num_stages, replicas=replicas, zero=zero, **values)

    def decided(self, **values: Any) -> DecidedConfig:
        """A copy with `values`, which replace everything that is left to the planner."""
        return DecidedConfig(**{**self.values(), "num_processes": self.processes, **values})

    @property
    def of_plan(self) -> dict[str, Any]:
        """The values of the keys that a plan has."""
        return {name: value for name, value in self.values().items() if name not in OF_THE_RUN}

    @property
    def memory_bytes(self) -> int | tuple[int, ...] | None:
        """`memory` as a number, or one for each process."""
        if isinstance(self.memory, tuple):
            return tuple(read_bytes(limit, "memory") for limit in self.memory)
        return None if self.memory is None else read_bytes(self.memory, "memory")

    @property
    def given_speeds(self) -> tuple[float, ...] | None:
        """`speeds`, where it has numbers."""
        return self.speeds if isinstance(self.speeds, tuple) else None

    def check_micro_batches(self, accumulation: int, rows: int | None = None) -> None:
        """Raise UserError where a replica would never get a micro-batch.

        Args:
            accumulation: mini-batches per step; a step has the micro-batches of all of them.
            rows: of a mini-batch, which has at most as many micro-batches; None: not known.
        """
        if self.is_mesh_open:
            return
        _, replicas = self.mesh
        counts = replicas if isinstance(replicas, tuple) else (replicas,)
        limits = {"num_micro_batches is": self.num_micro_batches, "the number of rows of a mini-batch is": rows}
        known = {words: limit for words, limit in limits.items() if isinstance(limit, int)}
        for words, limit in known.items():
            if limit * accumulation >= max(counts):
                continue
            step = f"{words} {limit}"
            if accumulation > 1:
                step += f", of each of the {accumulation} mini-batches of a step,"
            raise UserError(
                f"{step} and stage {counts.index(max(counts))} has {max(counts)} replicas: they take the micro-batches "
                "of a step in turn, so some would never get one; use at least as many micro-batches, and rows, as "
                "replicas (for an even load a multiple of them), or fewer replicas."
            )

    def table(self, accumulation: int, num_processes: int) -> Schedule | None:
        """Read the table from the file that `schedule` names; None if it names a builder or is "auto".

        Args:
            accumulation: mini-batches per step; the table has the micro-batches of all of them.
            num_processes: the number of processes of the job.

        Raises:
            UserError: the file cannot be read, its table cannot be run, or it contradicts the other fields.
        """
        if not is_table_file(self.schedule):
            return None
        self = self.with_defaults(can_plan=False)
        num_stages, replicas = self.mesh
        step, group_size = self.num_micro_batches, self.groups.size
        if isinstance(step, int):
            step *= accumulation * group_size
        table = read_table(self.schedule, num_stages, step, num_processes, replicas, group_size)
        recompute_under(table, self.recompute)
        for mode in self.modes.values():
            mode.check_table(table)
        return table


if TYPE_CHECKING:
    _WithDecidedModes = PipelineConfig
else:
    _WithDecidedModes = with_modes(PipelineConfig, are_decided=True)


class DecidedConfig(_WithDecidedModes):
    """A `PipelineConfig` that leaves nothing to the planner: what is run, and what a plan describes."""

    num_stages: Count
    num_micro_batches: Count
    schedule: ScheduleName | TableFile
    recompute: Annotated[Recomputation | Recomputations, Listed]
    partition: Annotated[tuple[Count, ...], Listed]
    replicas: Annotated[Count | tuple[Count, ...], Listed] = 1
    num_processes: Count

    @property
    def in_short(self) -> dict[str, Any]:
        """The values of the keys that say how the pipeline is cut and run."""
        names = ("num_stages", "num_micro_batches", "schedule", "recompute")
        return {name: getattr(self, name) for name in names}

    def reopened(self, **values: Any) -> PipelineConfig:
        """A copy with `values`, which may leave something to the planner again."""
        return PipelineConfig(**{**self.values(), **values})


#: Keys that may have another value in each process, and keys of a run that a plan does not have, these among them.
OF_EACH_PROCESS = tuple(name for name, key in keys_of(PipelineConfig).items() if EACH_PROCESS in key.marks)
OF_THE_RUN = tuple(name for name, key in keys_of(PipelineConfig).items() if {EACH_PROCESS, RUN} & {*key.marks})


@cache
def _may_be_auto() -> list[str]:
    """The names of the keys whose value the planner may choose."""
    keys = keys_of(PipelineConfig)
    return [name for name, key in keys.items() if name not in OF_THE_RUN and AUTO in choices(key.schema)]
