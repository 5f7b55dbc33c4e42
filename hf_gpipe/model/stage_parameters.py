"""The parameters of this process's stages: their names, gradients, shares among replicas, and files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hf_gpipe.adapters import Adapter, StageModel
from hf_gpipe.checkpoint import stage_weights
from hf_gpipe.checkpoint.peft import load_adapters
from hf_gpipe.checkpoint.save import written_into
from hf_gpipe.checkpoint.writer import CheckpointWriter, check_not_quantised
from hf_gpipe.errors import UserError
from hf_gpipe.model.trainable import TrainableLayers
from hf_gpipe.runtime.gradient_norm import clip, gradient_norm
from hf_gpipe.runtime.late_updates import LateUpdates
from hf_gpipe.runtime.mesh import Mesh
from hf_gpipe.runtime.replicas import Replicas
from hf_gpipe.runtime.shards import NOT_SET, Shards, treats_elements_alone
from hf_gpipe.runtime.ties import SharedParameters, Ties


class StageParameters:
    """The part of a pipeline that is about parameters. Every process must create it.

    Args:
        adapter: of the model.
        models: the stages of this process, by number.
        world: the processes.
        of_workers: of each worker of this process the stages that it runs; of shared ones all, whoever updates them.
        shares_updates: whether replicas share the updates of an optimizer.
        seed: of dropout, and of weights that a checkpoint does not have.
        shared: as of `Ties`.

    Attributes:
        ties: between stages.
        replicas: of the stages.
        trainable: what is trained.
        late: updates that wait for the next step.
    """

    def __init__(
        self,
        adapter: Adapter,
        models: dict[int, StageModel],
        world: Mesh,
        of_workers: Sequence[Mapping[int, StageModel]],
        shares_updates: bool,
        seed: int,
        shared: SharedParameters | None = None,
    ) -> None:
        self.adapter, self.models, self.world = adapter, models, world
        self._of_workers = of_workers
        self.ties = Ties(models, world, shared)
        self.replicas = Replicas(models, self.ties, world)
        self.trainable = TrainableLayers.of(adapter, models, world)
        self.late = LateUpdates()
        self.seed, self._shares_updates = seed, shares_updates
        self._shards: WeakKeyDictionary[torch.optim.Optimizer, Shards] = WeakKeyDictionary()

    @property
    def are_in_one_place(self) -> bool:
        """Whether this process has all stages, on one device."""
        return self.world.num_processes == 1 and len(set(self.world.stage_devices.values())) == 1

    @property
    def every_model(self) -> Iterator[StageModel]:
        """The models of all stages that this process runs: its own, and where stages are shared, one of each stage for
        each of its devices. What changes how a model computes must change all of them."""
        return (model for models in self._of_workers for model in models.values())

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This process's parameters under their Hugging Face names; a tied one once, in the process that owns it."""
        for stage, stage_model in self.models.items():
            for name, parameter in stage_model.parameters.items():
                if self.ties.owner_stage[name] == stage:
                    yield name, parameter

    def names_of(self, stage: int) -> list[str]:
        """The names of the parameters that a stage of this process owns."""
        return [name for name in self.models[stage].parameters if self.ties.owner_stage[name] == stage]

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """This process's parameters, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the replicas of a stage share the steps of an optimizer, and its state: ZeRO-1, for `zero` 1.

        Each replica then updates a shard of every parameter in `optimizer.step()`, which all replicas must call, and
        has the other replicas' new values after it. Everything else is as before. `PipelineTrainer` does this itself.

            pipe = Pipeline(model, 2, 8, replicas=2, zero=1)
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4)
            pipe.shard_optimizer(optimizer)

        Args:
            optimizer: of `parameters()`, or of some of them; of a class whose update of a parameter is known not to
                depend on other parameters.

        Raises:
            UserError: its class is another one, or `zero` is 0.
        """
        shards = self.shards_of(optimizer)
        if shards is None:
            raise UserError(f"shard_optimizer: {NOT_SET}, or leave the call out")
        shards.serve(optimizer)

    def shards_of(self, optimizer: torch.optim.Optimizer) -> Shards | None:
        """The shards of the parameters that replicas update in an optimizer's steps; None with `zero` 0.

        Raises:
            UserError: the class of the optimizer is not known to treat each parameter alone.
        """
        if not self._shares_updates:
            return None
        if optimizer not in self._shards:
            trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
            by_element = treats_elements_alone(optimizer)
            self._shards[optimizer] = Shards(trained, self.ties.owner_stage, by_element, self.replicas, self.world)
        return self._shards[optimizer]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters():
            parameter.grad = None

    def clip_grad_norm_(self, max_norm: float, norm: torch.Tensor | float | None = None) -> torch.Tensor:
        """Scale all gradients so that their norm over the whole model is at most `max_norm`.

        Args:
            max_norm: the largest norm that stays as it is.
            norm: of the gradients, where it is known, as `update` gets it; None: every process computes it.

        Returns:
            The norm before, a float64 tensor, the same on every process; each tied parameter counts once.
        """
        before = self.grad_norm() if norm is None else torch.as_tensor(norm, dtype=torch.float64)
        clip(self.parameters(), max_norm, float(before))
        return before

    def clip_stage_grad_norm_(self, stage: int, max_norm: float, norm: torch.Tensor) -> None:
        """Scale the gradients of one stage of this process so that their norm is at most `max_norm`.

        Args:
            stage: its number.
            max_norm: the largest norm that stays as it is.
            norm: of the stage's gradient, a scalar on its device; it is not read on the host.
        """
        torch.nn.utils.clip_grads_with_norm_(list(self.models[stage].parameters.values()), max_norm, norm)

    def grad_norm(self) -> torch.Tensor:
        """The 2-norm of the gradient of the whole model, a float64 tensor, the same on every process."""
        return gradient_norm(self.counted(), self.world)

    def counted(self, of_stage: int | None = None) -> list[torch.Tensor]:
        """The gradient of each parameter of the model once over all processes: of those that this one owns, in the
        first replica, and of a part that several ranks of a worker have, at the first of them.

        Args:
            of_stage: whose parameters alone count; None: those of all stages.
        """
        owner_stage, is_first = self.ties.owner_stage, self.world.is_in_first_replica
        gradients: list[torch.Tensor] = []
        for name, parameter in self.named_parameters():
            stage, gradient = owner_stage[name], parameter.grad
            if of_stage in (None, stage) and gradient is not None and is_first(stage):
                gradients += self.models[stage].division.counted(name, gradient)
        return gradients

    # ------------------------------------------------------------------ parts of parameters

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor that has a parameter's shape; other tensors stay as they are."""
        model = self.models[self.ties.owner_stage[name]]
        return model.division.part(name, whole) if whole.dim() == model.parameters[name].dim() else whole

    # ------------------------------------------------------------------ loading and saving

    def load_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Replace the weights by those of a Hub id or directory, in place, so that optimizers keep their parameters.

        Every process must call it, and reads its own stages' tensors; with PEFT adapters only those, in PEFT's format.
        Raises CheckpointError if the files are missing or do not fit the model.
        """
        check_not_quantised(self.adapter, "load_pretrained")
        self.late.make()
        # Of shared stages too, whose mapped weights and buffers each process has for itself.
        for models in self._of_workers:
            if self.adapter.peft is not None:
                load_adapters(Path(directory), models, self.adapter.peft)
                continue
            for stage_model in models.values():
                stage_weights.reload(stage_model, directory, self.seed)
        if self.world.placement.is_shared:
            # Others may still write into weights that all share.
            self.world.barrier()

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write the model in Hub format; `from_pretrained` of plain transformers loads it.

        Every process must call it and writes its own stages, one shard per stage. An interrupted save leaves the old
        checkpoint or none, never a part. With PEFT adapters only those are written, in PEFT's format.
        """
        self.save(Path(directory))

    def save(self, directory: Path, write_more: Callable[[Path], Any] | None = None) -> None:
        """Do what `save_pretrained` does. `write_more` writes what belongs to the model too, as of `write_new`."""
        base = getattr(self.adapter.config, "name_or_path", "")  # a chain of torch modules has no configuration
        keeps_model = self.adapter.peft is not None and bool(base) and Path(base).resolve() == directory.resolve()
        with written_into(directory, self.world, is_complete=write_more is not None, keeps_model=keeps_model) as new:
            self.write_new(new, write_more)

    def write_new(self, directory: Path, write_more: Callable[[Path], Any] | None = None) -> None:
        """Write the model into a new directory; the arguments are those of `CheckpointWriter.begin`."""
        writer = self.writer()
        writer.begin(directory, write_more)
        writer.write()

    def writer(self, world: Mesh | None = None) -> CheckpointWriter:
        """A writer of the model, and of the state of its training; `world`: whose messages it uses, if not its own."""
        self.late.make()
        return CheckpointWriter(self.adapter, self.models, self.ties, self.world if world is None else world)
