"""Who started this process: torchrun, srun, or a script that has made a process group itself, such as Ray Train's.

Everything else reads the variables of torchrun. This module fills them in from those of srun, or from the group. It
does not import torch, which takes seconds: who has made a group has imported it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from itertools import chain

#: Slurm gives these numbers to what it runs outside of srun: the shell of salloc, the script of sbatch, and others.
_FIRST_SPECIAL_STEP = 0xFFFFFF00
#: Below the ports that systems hand out for outgoing connections.
_FIRST_PORT, _NUM_PORTS = 10000, 20000


def note_launcher() -> None:
    """Write into the environment what srun or an existing process group says, under torchrun's names.

    What is there already stays. Without any of the three nothing changes.
    """
    if "RANK" in os.environ:
        return
    if has_group():
        dist = sys.modules["torch.distributed"]
        values = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    else:
        values = of_srun(os.environ)
    for name, value in values.items():
        os.environ.setdefault(name, value)


def has_group() -> bool:
    """Whether there is a default process group of torch.distributed."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and bool(dist.is_available() and dist.is_initialized())


def of_srun(environment: Mapping[str, str]) -> dict[str, str]:
    """Torchrun's variables for a task of srun; empty for anything else, and for a single task.

    Rank 0 runs on the first of the step's nodes. The port follows from the numbers of the job and the step, so that two
    jobs that share a node do not meet.

    Args:
        environment: of the task (srun's manual, "OUTPUT ENVIRONMENT VARIABLES").
    """
    step = environment.get("SLURM_STEP_ID", "")
    num_tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    # The script of sbatch has SLURM_PROCID too, and nobody has started the other tasks.
    if not step.isdigit() or int(step) >= _FIRST_SPECIAL_STEP or int(num_tasks) == 1:
        return {}
    nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    of_nodes = tasks_per_node(
        environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", num_tasks)
    )
    node = int(environment.get("SLURM_NODEID", "0"))
    port = _FIRST_PORT + (int(environment.get("SLURM_JOB_ID", "0")) + 101 * int(step)) % _NUM_PORTS
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": num_tasks,
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(of_nodes[node] if node < len(of_nodes) else 1),
        "MASTER_ADDR": first_node(nodes),
        "MASTER_PORT": str(port),
    }


def first_node(nodes: str) -> str:
    """The first name of a list of nodes: "gpu07" of "gpu[07-09,12],big1"."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def tasks_per_node(text: str) -> list[int]:
    """The tasks of each node: [2, 2, 2, 1] of "2(x3),1"."""
    parts = (re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(","))
    return list(chain.from_iterable([int(part[1])] * int(part[2] or 1) for part in parts if part))
