"""Fills the template of an engine in."""

from __future__ import annotations

import math
import os
import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_gpipe.commands import launch_templates as templates
from hf_gpipe.commands.train import STOPPED_FILE
from hf_gpipe.errors import UserError
from hf_gpipe.recipe import Recipe

#: Seconds that torchrun waits for its processes beyond `training.stop_seconds`, after which they end themselves.
_SHUTDOWN_SECONDS = 10
#: Seconds that an engine waits beyond that.
_GRACE_SECONDS = 20
#: SkyPilot's names of the planner's devices.
_ACCELERATORS = {
    "p100": "P100",
    "v100-16": "V100",
    "v100-32": "V100-32GB",
    "t4": "T4",
    "a100-40": "A100",
    "a100-80": "A100-80GB",
    "l4": "L4",
    "h100": "H100",
    "h200": "H200",
    "rtx3090": "RTX3090",
    "rtx4090": "RTX4090",
}
_PORT = 29500


@dataclass(frozen=True)
class JobFile:
    """The values that are filled into the template of a job's file.

    Attributes:
        recipe: of the run.
        arguments: of the train command: the recipe's path and key=value.
        nodes: machines.
        per_node: processes of each machine, one for each of its GPUs.
        comments: lines about the run, such as the plan.
        device: the planner's name of the GPUs; None: not known.
        image: of a container.
        claim: name of a PersistentVolumeClaim.
        folder: where the recipe's paths begin.
    """

    recipe: Recipe
    arguments: Sequence[str]
    nodes: int
    per_node: int
    comments: Sequence[str] = ()
    device: str | None = None
    image: str | None = None
    claim: str | None = None
    folder: Path = Path()

    def text(self, engine: str) -> str:
        """The file for an engine, one of `ENGINES`. Raises UserError where an option is missing."""
        return ENGINES[engine](self)

    @property
    def name(self) -> str:
        """Of the job: the recipe's, in the letters that every engine allows."""
        return re.sub(r"[^a-z0-9]+", "-", Path(self.arguments[0]).stem.lower()).strip("-")[:40].strip("-") or "train"

    @property
    def has_gpus(self) -> bool:
        """Whether the processes compute on GPUs."""
        return self.recipe.pipeline.device != "cpu"

    @property
    def shutdown_seconds(self) -> int:
        """Seconds that torchrun gives its processes to end after a signal."""
        return math.ceil(self.recipe.training.stop_seconds) + _SHUTDOWN_SECONDS

    @property
    def marker(self) -> str:
        """The file that says that a signal has stopped the training and all is saved."""
        return shlex.quote(str(Path(self.recipe.training.output_dir) / STOPPED_FILE))

    def _fill(self, template: templates.FileTemplate, **values: object) -> str:
        common = {
            "name": self.name,
            "nodes": self.nodes,
            "per_node": self.per_node,
            "comments": "\n".join(f"# {line}".rstrip() for line in self.comments),
            "marker": self.marker,
            "arguments": shlex.join(self.arguments),
            "shutdown_seconds": self.shutdown_seconds,
            "grace_seconds": self.shutdown_seconds + _GRACE_SECONDS,
            "secret": templates.SECRET,
        }
        return template.substitute({**common, **values})

    def _run(self, rendezvous: str, indent: int = 0) -> str:
        """The lines that run torchrun. `rendezvous` says how its agents find each other."""
        return textwrap.indent(self._fill(templates.RUN, rendezvous=rendezvous), " " * indent)

    def _machines(self) -> str:
        """Options of torchrun, for a shell that knows the number of the machine and the address of the first."""
        if self.nodes == 1:
            return f"--standalone --nproc-per-node {self.per_node}"
        return (
            f"--nnodes {self.nodes} --nproc-per-node {self.per_node} "
            f'--node-rank "$machine" --master-addr "$first" --master-port {_PORT}'
        )


def _torchrun(file: JobFile) -> str:
    how = templates.ONE_MACHINE if file.nodes == 1 else templates.EVERY_MACHINE
    return file._fill(templates.TORCHRUN, how=how, run=file._run(file._machines()))


def _slurm(file: JobFile) -> str:
    return file._fill(
        templates.SLURM,
        gpus_line=f"#SBATCH --gpus-per-node={file.per_node}\n" if file.has_gpus else "",
        signal_seconds=file.shutdown_seconds + _GRACE_SECONDS,
    )


def _kubernetes(file: JobFile) -> str:
    for option, value in (("--image", file.image), ("--claim", file.claim)):
        if value is None:
            raise UserError(
                f"{option} is not given and kubernetes needs it: --image IMAGE has hf_gpipe installed, --claim NAME is "
                "a PersistentVolumeClaim that all pods can write, with the recipe and the data"
            )
    gpus = f"    resourcesPerNode:\n      limits:\n        nvidia.com/gpu: {file.per_node}\n" if file.has_gpus else ""
    # Kubeflow tells torchrun by variables how many machines there are, and which of them this is.
    run = file._run("", indent=10)
    return file._fill(templates.KUBERNETES, image=file.image, claim=file.claim, gpus_block=gpus, run=run)


def _skypilot(file: JobFile) -> str:
    resources = "  cpus: 4+\n"
    if file.has_gpus:
        if file.device not in _ACCELERATORS:
            found = "not given" if file.device is None else repr(file.device)
            raise UserError(
                f"--device is {found}, and skypilot needs the kind of GPU; give one of {', '.join(_ACCELERATORS)}, or "
                "pipeline.device=cpu"
            )
        resources = f"  accelerators: {_ACCELERATORS[file.device]}:{file.per_node}\n"
    return file._fill(templates.SKYPILOT, resources=resources, run=file._run(file._machines(), indent=2))


def _ray(file: JobFile) -> str:
    return file._fill(
        templates.RAY,
        folder=repr(os.path.abspath(file.folder)),
        argument_list=repr(list(file.arguments)),
        num_processes=file.nodes * file.per_node,
        use_gpu=file.has_gpus,
    )


#: The file of each engine.
ENGINES = {
    "torchrun": _torchrun,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "skypilot": _skypilot,
    "ray": _ray,
}
