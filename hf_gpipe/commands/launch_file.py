"""Fills in the file of an engine: those in `engines/`, in which a name after @ is replaced; $ is the shell's."""

from __future__ import annotations

import math
import os
import re
import shlex
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from string import Template

from hf_gpipe.commands.train import STOPPED_FILE
from hf_gpipe.errors import UserError
from hf_gpipe.recipe import Recipe

#: The file of each engine. run.sh.in is a part of several. It waits for torchrun and passes on the signal that the
#: engine sends. torchrun hides the exit code 75 of a training that a signal has stopped; the marker brings it back.
ENGINES = {
    "torchrun": "torchrun.sh.in",
    "slurm": "slurm.sh.in",
    "kubernetes": "kubernetes.yaml.in",
    "skypilot": "skypilot.yaml.in",
    "ray": "ray.py.in",
}
#: Seconds that torchrun waits for its processes beyond `training.stop_seconds`, after which they end themselves.
_SHUTDOWN_SECONDS = 10
#: Seconds that an engine waits beyond that.
_GRACE_SECONDS = 20
#: SkyPilot's names of the planner's devices.
_ACCELERATORS = {
    **{"p100": "P100", "v100-16": "V100", "v100-32": "V100-32GB", "t4": "T4", "a100-40": "A100"},
    **{"a100-80": "A100-80GB", "l4": "L4", "h100": "H100", "h200": "H200", "rtx3090": "RTX3090", "rtx4090": "RTX4090"},
}
_PORT = 29500
#: The columns of a line, and of arguments that stay beside their command.
_WIDTH, _SHORT = 100, 36


class _File(Template):
    delimiter = "@"


def job_file(
    engine: str,
    recipe: Recipe,
    arguments: Sequence[str],
    nodes: int,
    per_node: int,
    comments: Sequence[str] = (),
    *,
    device: str | None = None,
    image: str | None = None,
    claim: str | None = None,
) -> str:
    """The file that starts a job.

    Args:
        engine: one of `ENGINES`.
        recipe: of the run.
        arguments: of the train command: the recipe's path and key=value.
        nodes: machines.
        per_node: processes of each machine, one for each of its GPUs.
        comments: lines about the run, such as the plan.
        device: the planner's name of the GPUs; None: not known.
        image: of a container.
        claim: name of a PersistentVolumeClaim.

    Raises:
        UserError: the engine needs an option that is not given.
    """
    has_gpus, is_alone = recipe.pipeline.device != "cpu", nodes == 1
    shutdown_seconds = math.ceil(recipe.training.stop_seconds) + _SHUTDOWN_SECONDS
    values = {
        # The recipe's, in the letters that every engine allows.
        "name": re.sub(r"[^a-z0-9]+", "-", Path(arguments[0]).stem.lower()).strip("-")[:40].strip("-") or "train",
        "nodes": nodes,
        "per_node": per_node,
        "num_processes": nodes * per_node,
        "comments": _commented(comments),
        # A signal has stopped the training, and all is saved.
        "marker": shlex.quote(str(Path(recipe.training.output_dir) / STOPPED_FILE)),
        "arguments": _on_lines(arguments),
        "argument_list": repr(list(arguments)),
        "folder": repr(os.getcwd()),
        "shutdown_seconds": shutdown_seconds,
        "grace_seconds": shutdown_seconds + _GRACE_SECONDS,
        "use_gpu": has_gpus,
        "slurm_gpus": f"#SBATCH --gpus-per-node={per_node}\n" if has_gpus else "",
        "pod_gpus": f"    resourcesPerNode:\n      limits:\n        nvidia.com/gpu: {per_node}\n" if has_gpus else "",
        "image": image,
        "claim": claim,
    }
    # Options of torchrun, for a shell that knows the number of the machine and the address of the first.
    rendezvous = f"--standalone --nproc-per-node {per_node}"
    if engine == "kubernetes":
        for option, value in (("--image", image), ("--claim", claim)):
            if value is None:
                raise UserError(
                    f"{option} is not given and kubernetes needs it: --image IMAGE has hf_gpipe installed, --claim "
                    "NAME is a PersistentVolumeClaim that all pods can write, with the recipe and the data"
                )
        # Kubeflow tells torchrun by variables how many machines there are, and which of them this is.
        rendezvous = ""
    elif not is_alone:
        rendezvous = (
            f"--nnodes {nodes} --nproc-per-node {per_node} "
            f'--node-rank "$machine" --master-addr "$first" --master-port {_PORT}'
        )
    if engine == "skypilot":
        if has_gpus and device not in _ACCELERATORS:
            given = "not given" if device is None else repr(device)
            raise UserError(
                f"--device is {given}, and skypilot needs the kind of GPU; give one of {', '.join(_ACCELERATORS)}, or "
                "pipeline.device=cpu"
            )
        values["resources"] = f"accelerators: {_ACCELERATORS[device]}:{per_node}" if has_gpus and device else "cpus: 4+"
    run = _filled("run.sh.in", {**values, "rendezvous": rendezvous})
    values["run"] = textwrap.indent(run, " " * {"kubernetes": 10, "skypilot": 2}.get(engine, 0))
    return _filled("torchrun_one.sh.in" if engine == "torchrun" and is_alone else ENGINES[engine], values)


def _commented(lines: Iterable[str]) -> str:
    """Comments of a shell; a line that is too wide goes on below its own words."""
    wrap = partial(textwrap.wrap, width=_WIDTH - 2, subsequent_indent=" " * 14, break_on_hyphens=False)
    return "\n".join(f"# {line}".rstrip() for text in lines for line in wrap(text) or [""])


def _on_lines(arguments: Iterable[str]) -> str:
    """Arguments for a shell, on lines of their own where they are long."""
    first, *others = map(shlex.quote, arguments)
    lines = [first]
    for word in others:
        if len(lines[-1]) + len(word) < _WIDTH - 20:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    is_short = len(lines) == 1 and len(lines[0]) < _SHORT
    return lines[0] if is_short else "\\\n    " + " \\\n    ".join(lines)


def _filled(name: str, values: dict[str, object]) -> str:
    return _File((Path(__file__).parent / "engines" / name).read_text()).substitute(values)
