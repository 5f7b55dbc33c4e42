"""Copies of the weights, which the optimizer updates in their place: in float32, or on the host, or both.

An update of a bfloat16 weight that is smaller than 1/256 of it is lost in rounding; in a float32 copy such updates add
up (Micikevicius et al. 2018, Mixed Precision Training, arXiv 1710.03740, section 3.1). The model keeps its half
precision, and so do its gradients, the tensors that cross stage boundaries, and the model files.

Where the copies are in CPU memory, so is the optimizer's state, and the host computes the update (Ren et
al. 2021, ZeRO-Offload, arXiv 2101.06840, section 4). The device keeps weights and gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hf_gpipe.checkpoint.writer import on_cpu
from hf_gpipe.errors import UserError
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.runtime.shards import SETTING, Shards
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.disk_state import zeros_on_disk

#: The name of a copy among the entries of its parameter's optimizer state, in a checkpoint.
SLOT = "master_weight"


class MasterWeights:
    """The copies of this process's trainable parameters, by their Hugging Face names.

    Args:
        parameters: name -> parameter. Copies in float32 need all trainable parameters in half precision.
        in_float32: whether the copies are in float32; otherwise they have the type of the weights.
        on_host: whether the copies are in CPU memory; otherwise they are where the weights are.
        folder: where the files are that those in CPU memory are in (`hf_gpipe.training.disk_state`); None: in none.

    Raises:
        UserError: a parameter is not in half precision, or is in CPU memory itself; or the folder has too little room.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        in_float32: bool = True,
        on_host: bool = False,
        folder: str | None = None,
    ) -> None:
        self._weights = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        for name, weight in self._weights.items():
            if in_float32 and weight.dtype not in (torch.bfloat16, torch.float16):
                raise UserError(
                    f"fp32_master_weights: {name} is {weight.dtype}, of which no copy in float32 is needed; load or "
                    "create the model in bfloat16, or leave the argument out"
                )
            if on_host and weight.device.type == "cpu":
                raise UserError(
                    "offload_optimizer: the weights are in CPU memory, and so the optimizer's state is "
                    "there already; leave the argument out"
                )
        self.in_float32, self._on_host, self._folder = in_float32, on_host, folder
        #: What the weights' gradients are divided by, in the type of the copies: float16 has no values as small.
        self.loss_scale = 1.0
        #: The argument that asks for the copies.
        self.asked_by = "fp32_master_weights" if in_float32 else "offload_optimizer"
        self._shards: Shards | None = None
        #: The copies, by name. After `shard` they copy this replica's shards, and are empty where it has none.
        self.copies = {name: torch.nn.Parameter(copy) for name, copy in self._copies(self._weights).items()}

    @classmethod
    def of(cls, args: PipelineTrainingArguments, pipe: Pipeline) -> MasterWeights | None:
        """Make the copies that the arguments ask for; None: none. Raises UserError where copies are not possible."""
        if not (args.fp32_master_weights or args.offload_optimizer):
            return None
        parameters = dict(pipe.named_parameters())
        where = {"on_host": args.offload_optimizer, "folder": args.optimizer_state_dir}
        return cls(parameters, in_float32=args.fp32_master_weights, **where)

    @torch.no_grad()
    def _copies(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        def empty(weight: torch.Tensor, **where: Any) -> torch.Tensor:
            return torch.empty_like(weight, dtype=torch.float32 if self.in_float32 else weight.dtype, **where)

        copies: dict[str, torch.Tensor] = {}
        if self._folder is not None:
            hosted = {n: empty(w, device="meta") for n, w in weights.items() if self._on_host or w.device.type == "cpu"}
            on_disk = zeros_on_disk(self._folder, list(hosted.values()), "copies of the weights")
            copies = dict(zip(hosted, on_disk, strict=True))
        pinned = {"device": "cpu", "pin_memory": True} if self._on_host else {}
        return {n: (copies[n] if n in copies else empty(w, **pinned)).copy_(w) for n, w in weights.items()}

    def serve(self, optimizer: torch.optim.Optimizer) -> None:
        """Let every step of an optimizer of `copies` begin with the weights' gradients and end with new weights."""
        optimizer.register_step_pre_hook(lambda stepping, *_: self._take_gradients(stepping))
        optimizer.register_step_post_hook(lambda *_: self._give_values())

    def shard(self, shards: Shards, optimizer: torch.optim.Optimizer) -> None:
        """Keep the copies, and the optimizer's state, of this replica's shards alone. A second call does nothing.

        Raises:
            UserError: the copies were made for other shards already.
        """
        if self._shards is not None:
            if not self._shards.are_like(shards):
                raise UserError(
                    f"{SETTING} and the optimizer is another one, {type(optimizer).__name__}, which would need other "
                    "parts of the copies of the weights; make a new trainer"
                )
            return
        self._shards = shards
        shards.cut_state(optimizer, self.copies)
        for name, copy in self.copies.items():
            part = shards.own(name, copy.data)
            if part is not copy.data:
                # A clone would not be pinned.
                copy.data = copy.data.new_empty(0) if part is None else self._copies({name: part})[name]

    def _own(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """The part of a tensor of a parameter's shape that has a copy here; None: nothing has."""
        return tensor if self._shards is None else self._shards.own(name, tensor)

    def _take_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        # A step may update some parameters alone, while gradients of others come in another thread.
        held = {copy for group in optimizer.param_groups for copy in group["params"]}
        weights = {name: weight for name, weight in self._weights.items() if self.copies[name] in held}
        owned = {name: self._own(name, weight.grad) for name, weight in weights.items() if weight.grad is not None}
        gradients = {name: gradient for name, gradient in owned.items() if gradient is not None}
        if self._on_host:
            gradients = on_cpu(gradients)
        for name, copy in self.copies.items():
            copy.grad = gradients[name].to(copy.dtype) if name in gradients else None
            if copy.grad is not None and self.loss_scale != 1:
                copy.grad.mul_(1.0 / self.loss_scale)

    @torch.no_grad()
    def _give_values(self) -> None:
        for name, weight in self._weights.items():
            copy = self.copies[name]
            # A copy without a gradient has not changed: a step may update some stages alone.
            if copy.grad is not None and (own := self._own(name, weight)) is not None:
                # The copy is on the stream of the next gradients' way to the host, for which the next update waits.
                own.copy_(copy, non_blocking=True)
            copy.grad = None
        if self._shards is not None:
            self._shards.share_values()

    @contextmanager
    def in_state_of(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Context manager in which the optimizer's state also holds the copies, to be saved with it.

        Copies that have the type of the weights are equal to the weights.
        """
        copies = [
            copy
            for name, copy in self.copies.items()
            if self.in_float32 and self._own(name, self._weights[name]) is not None
        ]
        for copy in copies:
            optimizer.state[copy][SLOT] = copy.detach()
        try:
            yield
        finally:
            for copy in copies:
                del optimizer.state[copy][SLOT]

    @torch.no_grad()
    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the copies out of an optimizer state, where it has them; elements that are not their weight's follow it.

        The weights may have changed without their copies: by a script, by loading the best checkpoint, or in a run
        without copies that has kept the state of a run that had some.
        """
        for name, weight in self._weights.items():
            if (own := self._own(name, weight)) is not None:
                copy = self.copies[name]
                saved, values = optimizer.state.get(copy, {}).pop(SLOT, copy), own.to(copy.device)
                copy.copy_(torch.where(saved.to(own.dtype) == values, saved, values))
