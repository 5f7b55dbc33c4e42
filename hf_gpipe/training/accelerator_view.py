"""`trainer.accelerator`: what scripts and callbacks read of accelerate's Accelerator, over the processes of a job."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hf_gpipe.errors import MissingAttributeError, UserError
from hf_gpipe.job.world import World
from hf_gpipe.libraries.accelerate import recursively_apply
from hf_gpipe.training.arguments import PipelineTrainingArguments


class AcceleratorView:
    """The facts and the messages of an Accelerator. Nothing is prepared or wrapped: the pipeline does that.

    Processes are those of the pipeline, so a mini-batch's rows are not divided among them, and `gather` gives what each
    of them has.

    Args:
        world: the processes.
        args: the arguments of the trainer.
    """

    #: A step is whole when a callback or a script looks.
    sync_gradients = True

    def __init__(self, world: World, args: PipelineTrainingArguments) -> None:
        self._world, self._args = world, args
        self.num_processes, self.process_index, self.device = world.num_processes, world.rank, world.device
        self.is_main_process, self.is_last_process = world.is_main, world.rank == world.num_processes - 1
        self.local_process_index = args.local_process_index
        self.is_local_main_process = args.local_process_index == 0
        self.mixed_precision = {None: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}[args.autocast]
        self.gradient_accumulation_steps = args.gradient_accumulation_steps

    if not TYPE_CHECKING:  # a type checker goes on finding what is misspelt

        def __getattr__(self, name: str) -> Any:
            raise MissingAttributeError(
                f"trainer.accelerator has no {name}: the pipeline itself places, prepares and trains the model; see "
                "trainer.world for the processes and trainer.pipe for the stages"
            )

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The model, since nothing is wrapped around it."""
        return model

    def prepare(self, *objects: Any, **kwargs: Any) -> Any:
        """The objects, unchanged. Raises UserError for a model or an optimizer, which the pipeline has its own way of.

        A data loader's items are mini-batches of all rows; the pipeline divides and moves them.
        """
        for one in objects:
            if isinstance(one, nn.Module | torch.optim.Optimizer):
                raise UserError(
                    f"trainer.accelerator.prepare: a {type(one).__name__} cannot be prepared, since the pipeline "
                    "trains its stages; give the trainer the model, and an optimizer as `optimizers`"
                )
        return objects[0] if len(objects) == 1 else objects

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this method."""
        self._world.barrier()

    def gather(self, tensor: Any) -> Any:
        """The tensors of all processes, joined at the first dimension; of each tensor in lists and dicts. All call it.

        Args:
            tensor: of the same shape and type in every process, on the CPU or on the process's first device.
        """
        return recursively_apply(self._gather, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`; what are no tensors are joined in a list with the objects of all processes."""
        if use_gather_object:
            return [one for each in self._world.gather_objects(input_data) for one in each]
        return self.gather(input_data)

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.detach().contiguous()
        own = own[None] if own.dim() == 0 else own
        if self.num_processes == 1:
            return own
        parts = [torch.empty_like(own) for _ in range(self.num_processes)]
        dist.all_gather(parts, own, group=self._world.group_on(own.device))
        return torch.cat(parts)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print in the main process."""
        if self.is_main_process:
            print(*args, **kwargs)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Context manager whose block the main process runs before the others, however long it takes."""
        return self._args.main_process_first(local=False)
