"""The rules between the keys of the section `pipeline`."""

from __future__ import annotations

from hf_gpipe.errors import UserError
from hf_gpipe.recipe.pipeline_keys import AUTO, SYNCHRONOUS_SCHEDULES
from hf_gpipe.recipe.pipeline_values import PipelineValues
from hf_gpipe.schedule import ASYNCHRONOUS_SCHEDULES, DEALT, DIVIDED_HEAD, is_table_file, replicas_of


def check(config: PipelineValues) -> None:
    """Raise UserError where keys contradict each other; the message has both, and what to do."""
    if config.is_mesh_open:
        _check_open_mesh(config)
    else:
        _check_mesh(config)
    _check_lists(config)
    if config.torch_compile_backend is not None and not config.torch_compile:
        raise UserError(
            f"torch_compile_backend is {config.torch_compile_backend!r} and torch_compile is false; set "
            "torch_compile to true, or leave the backend out."
        )
    if config.schedule in ASYNCHRONOUS_SCHEDULES:
        _check_asynchronous(config)
    if config.sequence_parallel and config.tensor_parallel == 1:
        raise UserError(
            "sequence_parallel is true and tensor_parallel is 1, so nothing has parts of the positions; give "
            "tensor_parallel, or leave sequence_parallel out."
        )
    _check_chunks(config)
    _check_visits(config)


def _check_lists(config: PipelineValues) -> None:
    """Raise UserError for a list of another length than it must have."""
    for name, value in (("partition", config.partition), ("recompute", config.recompute)):
        if isinstance(value, tuple) and len(value) != config.num_stages:
            raise UserError(
                f"{name} {list(value)} has {len(value)} entries and num_stages is {config.num_stages}; give one "
                "entry for each stage."
            )
    for name, of_processes in (("memory", config.memory), ("speeds", config.speeds)):
        if isinstance(of_processes, tuple) and config.num_processes not in (None, len(of_processes)):
            raise UserError(
                f"{name} {list(of_processes)} has {len(of_processes)} entries and num_processes is "
                f"{config.num_processes}; give one entry for each process."
            )
    if config.devices == ():
        raise UserError("devices [] is empty; name at least one device, or leave it out.")


def _check_chunks(config: PipelineValues) -> None:
    if isinstance(config.sequence_chunks, str):
        config.most_chunk_tokens  # noqa: B018  # raises UserError for another text
        if is_table_file(config.schedule):
            raise UserError(
                f"sequence_chunks is {config.sequence_chunks!r} and schedule is {config.schedule}, a table of so many "
                "chunks as it says; give that number as sequence_chunks."
            )
    if config.chunk_taper != 0 and not config.cuts_rows:
        raise UserError(
            f"chunk_taper is {config.chunk_taper} and sequence_chunks is 1, so rows are whole; give sequence_chunks, "
            "or leave chunk_taper out."
        )
    if config.chunk_taper == AUTO and config.partition == "profile":
        raise UserError(
            "chunk_taper is auto and partition is profile, which measures chunks of one length; give a number, "
            "such as 0, or partition auto."
        )
    without_chunks = (*DIVIDED_HEAD, *DEALT)
    if config.cuts_rows and config.schedule in (*ASYNCHRONOUS_SCHEDULES, *without_chunks):
        others = [name for name in SYNCHRONOUS_SCHEDULES if name not in without_chunks]
        raise UserError(
            f"sequence_chunks is {config.sequence_chunks} and schedule is {config.schedule}, which has no order for "
            f"rows that are cut into chunks; use one of {', '.join(others)}, or leave sequence_chunks out."
        )


def _check_visits(config: PipelineValues) -> None:
    visitors = config.offload_weights
    if visitors == AUTO and is_table_file(config.schedule):
        raise UserError(
            f"offload_weights is auto and schedule is {config.schedule}, a table; give the weights that visit under "
            "it, or leave offload_weights out."
        )
    if "host" in (config.recompute or ()) and visitors not in (None, AUTO):
        raise UserError(
            f"recompute is {config.recompute if isinstance(config.recompute, str) else list(config.recompute)} and "
            f"offload_weights {visitors}: graphs on the host keep weights on the device; let recompute be stage, or "
            "leave offload_weights out."
        )
    if config.schedule in DEALT:
        check_dealt(config)


def check_dealt(config: PipelineValues) -> None:
    """Raise UserError for keys that stages do not go with which are dealt to all processes."""
    name, visitors = config.schedule, config.offload_weights
    if visitors not in ("all", AUTO):
        raise UserError(
            f"schedule is {name} and offload_weights {visitors or 'null'}: its stages are dealt to all processes, so "
            "all weights visit, adapters too; set offload_weights to all, or use another schedule."
        )
    if config.tensor_parallel > 1:
        raise UserError(f"schedule {name!r} and tensor_parallel {config.tensor_parallel}: use one of the two")


def check_beside_teacher(config: PipelineValues) -> None:
    """Raise UserError for keys that a teacher does not go with."""
    unsupported = {
        "sequence_chunks": config.cuts_rows,
        "offload_weights": config.offload_weights is not None,
        "schedule": config.schedule in ASYNCHRONOUS_SCHEDULES,
    }
    for name, is_asked in unsupported.items():
        if is_asked:
            raise UserError(f"teacher: {name} is {getattr(config, name)}, which is not supported beside a teacher")


def _check_asynchronous(config: PipelineValues) -> None:
    """Raise UserError for what an asynchronous schedule cannot run with."""
    if config.is_mesh_open:
        name = "num_stages" if config.num_stages == AUTO else "replicas"
        raise UserError(
            f"schedule is {config.schedule} and {name} is auto; give {name}, for with it the numbers of an "
            "asynchronous schedule change."
        )
    reasons = {
        "zero": ": replicas share the whole step of an optimizer, and here each stage updates by itself",
        "torch_compile": ": compiled blocks would not see the versions of the weights that the schedule keeps",
        "tensor_parallel": "",
    }
    for name, why in reasons.items():
        if (value := getattr(config, name)) != getattr(PipelineValues, name):
            raise UserError(
                f"schedule is {config.schedule} and {name} is {str(value).lower()}, which do not go together{why}; "
                f"leave {name} out, or use a synchronous schedule, such as 1f1b."
            )


def _check_mesh(config: PipelineValues) -> None:
    """Raise UserError where stages, replicas, placement and processes do not fit each other."""
    num_stages, replicas = config.mesh
    replicas_of(num_stages, replicas)
    if config.num_processes is not None and config.num_processes > config.places:
        raise UserError(
            f"num_processes is {config.num_processes} and num_stages is {num_stages}; a process without a stage "
            "has nothing to do: use at most as many processes as stages, or more replicas."
        )
    if config.zero and config.places == num_stages:
        raise UserError(
            f"zero is {config.zero} and replicas is {replicas}: no stage has replicas that could share its "
            "optimizer's state; use zero 0, or at least 2 replicas of a stage."
        )
    if config.placement is not None and is_table_file(config.schedule):
        raise UserError(f"placement is {config.placement!r} and {config.schedule} has a placement; leave it out.")
    has_order = config.places > num_stages or config.placement is not None
    if config.num_processes is not None and has_order and not is_table_file(config.schedule):
        config.placed("gpipe")


def _check_open_mesh(config: PipelineValues) -> None:
    """Raise UserError where something says how many stages or replicas there are, and the planner is to choose."""
    open_names = [name for name in ("num_stages", "replicas") if getattr(config, name) == AUTO]
    lists = [name for name in ("partition", "recompute", "replicas") if isinstance(getattr(config, name), tuple)]
    if config.num_stages == AUTO and lists:
        raise UserError(
            f"num_stages is auto and {lists[0]} is a list with one entry per stage; give num_stages, or let "
            f"{lists[0]} be auto."
        )
    if config.placement is not None or is_table_file(config.schedule):
        given = "placement" if config.placement is not None else "the table"
        raise UserError(
            f"{open_names[0]} is auto, and {given} says how many stages and replicas there are; give the numbers too."
        )
