"""`Pipeline`: a Hugging Face model, its partition over stages, and the executor that trains it."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from hf_gpipe.adapters import StageModel, adapter_for, is_known_exact
from hf_gpipe.adapters.dropout import default_generator
from hf_gpipe.adapters.guards import check_as_configured, check_model
from hf_gpipe.adapters.peft import find_peft, make_peft
from hf_gpipe.checkpoint import hub
from hf_gpipe.checkpoint.peft import load_adapters, save_adapters
from hf_gpipe.checkpoint.save import save_model
from hf_gpipe.errors import CheckpointError, PartitionError, UserError
from hf_gpipe.exactness import verify
from hf_gpipe.partition import partition as cut
from hf_gpipe.runtime.batches import share
from hf_gpipe.runtime.edges import connect
from hf_gpipe.runtime.executor import ActionTime, Executor
from hf_gpipe.runtime.generation import Generator
from hf_gpipe.runtime.launch import join
from hf_gpipe.runtime.micro_batch import Batch, make_micro_batches
from hf_gpipe.runtime.stage import LogitsCallback, Stage
from hf_gpipe.runtime.ties import Ties
from hf_gpipe.runtime.topology import Topology
from hf_gpipe.schedule.actions import Placement
from hf_gpipe.schedule.builders import build
from hf_gpipe.schedule.table import Schedule

ModelSource: TypeAlias = PreTrainedModel | PreTrainedConfig | str | os.PathLike[str]
"""A model in memory, a configuration to initialise, or a Hub id or directory to load."""

RECOMPUTE_MODES = ("none", "block", "stage")


@dataclass(frozen=True)
class Evaluation:
    """The loss of a mini-batch in evaluation, the same on every process.

    Attributes:
        row_nll: negative log-likelihood summed over each row's target tokens, (N,), natural logarithm.
        row_tokens: number of target tokens of each row, (N,).
    """

    row_nll: torch.Tensor
    row_tokens: torch.Tensor

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood per target token."""
        return float(self.row_nll.sum() / self.row_tokens.sum().clamp(min=1))


class Pipeline:
    """A model trained by pipeline parallelism, with the numbers of the plain model (GPipe, arXiv 1811.06965).

    In one process without a launcher all stages live in it. Under torchrun, `accelerate launch` or
    `python -m hf_gpipe.train` every process creates the same Pipeline and holds its own stages.

    Args:
        model: a PreTrainedModel (its weights are taken, and shared where the device is the same), a configuration
            (weights are initialised), or a Hub id or directory (weights are loaded).
        num_stages: K.
        num_micro_batches: M; a mini-batch of n rows is cut into min(M, n) micro-batches.
        schedule: name of a table in hf_gpipe.schedule.builders: "naive", "gpipe", "gpipe_fused" ...
        recompute: "none", "block" (transformers' checkpointing of each block) or "stage" (only a stage's inputs are
            kept between forward and backward).
        partition: "count", or the number of layers of each stage.
        seed: of initial weights and dropout.
        dtype: type of the weights; None: the model's own, or float32 for a configuration without one.
        attn_implementation: "eager", "sdpa" ...; None leaves the choice to transformers.
        trust_remote_code: whether a Hub model may run Python code of its own.
        config_overrides: values of the configuration to change; only with an id or directory.
        label_smoothing: share of the target's probability spread over the vocabulary.
        device: where this process computes; None: a CUDA device where there is one, else the CPU.
        peft_config: a peft.LoraConfig to add adapters with; all else is frozen. A model that has PEFT adapters
            already, or is a PeftModel, is taken as it is.

    Raises:
        UserError: one of its kinds for each argument that cannot be honoured.
    """

    def __init__(
        self,
        model: ModelSource,
        num_stages: int,
        num_micro_batches: int = 1,
        schedule: str = "gpipe",
        recompute: str = "stage",
        partition: str | Sequence[int] = "count",
        seed: int = 0,
        *,
        dtype: torch.dtype | None = None,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        config_overrides: Mapping[str, Any] | None = None,
        label_smoothing: float = 0.0,
        device: torch.device | str | None = None,
        peft_config: Any = None,
    ) -> None:
        if recompute not in RECOMPUTE_MODES:
            raise UserError(f"recompute={recompute!r}: expected one of {', '.join(RECOMPUTE_MODES)}")
        if num_micro_batches < 1:
            raise UserError(f"num_micro_batches={num_micro_batches}: expected at least 1")
        if num_stages < 1:
            raise PartitionError(f"num_stages={num_stages}: expected at least 1")
        model, peft = find_peft(model, peft_config)
        check_model(model)
        if not 0 <= label_smoothing < 1:
            raise UserError(f"label_smoothing={label_smoothing!r}: expected at least 0 and below 1")
        if config_overrides and not isinstance(model, str | os.PathLike):
            raise UserError("config_overrides go with a Hub id or directory; change the configuration that you give")
        config = _config_of(model, trust_remote_code, config_overrides)
        if isinstance(model, PreTrainedModel):
            if dtype not in (None, model.dtype):
                raise UserError(f"dtype={dtype}: the given model is {model.dtype}; convert it before, with model.to")
            dtype = model.dtype
            attn_implementation = attn_implementation or config._attn_implementation
        dtype = dtype or getattr(config, "dtype", None) or torch.float32
        model_class = type(model) if isinstance(model, PreTrainedModel) else None
        self.adapter = adapter_for(config, dtype, attn_implementation, model_class, trust_remote_code=trust_remote_code)
        if not is_known_exact(self.adapter):
            verify(config, model_class, trust_remote_code=trust_remote_code)
        if (generation_config := _generation_config_of(model)) is not None:
            self.adapter.reference.generation_config = generation_config
        self.peft = None if peft is None else make_peft(self.adapter, *peft)
        self._has_peft_layers = bool(getattr(model, "peft_config", None))
        if isinstance(model, PreTrainedModel):
            expected = self.adapter.reference
            if self.peft is not None and self._has_peft_layers:
                expected = self.adapter.skeleton()
                self.peft.inject(expected)
            check_as_configured(model, expected)
        self.partition = cut(len(self.adapter.layers), num_stages, partition)
        self.num_stages = num_stages
        self.num_micro_batches = num_micro_batches
        self.schedule_name = schedule
        self.recompute = recompute
        self.seed = seed
        #: Optimizer steps begun; dropout depends on it.
        self.step = 0
        # A schedule that does not exist is found here, before any weight is read.
        self.schedule(num_micro_batches)

        join()
        self.topology = Topology.discover(num_stages, device)
        self.models = {s: self._materialise(model, s) for s in self.topology.local_stages}
        if recompute == "block":
            for stage_model in self.models.values():
                stage_model.checkpoint_blocks()
        self.ties = Ties(self.models, self.topology)
        self._holds_weights = self._copies_are_fresh = False
        self._was_trainable = {name: p.requires_grad for m in self.models.values() for name, p in m.parameters.items()}
        trainable = self._trainable_layers()
        self.stages = {
            s: self._stage(stage_model, trainable, label_smoothing) for s, stage_model in self.models.items()
        }
        self._edges = connect(
            self.topology, lambda stage, name: self.adapter.carry_dtype(self.partition[stage][0], name)
        )
        self._executor = Executor(self.stages, self._edges, self.topology.rank, self.topology.device)

    # ------------------------------------------------------------------ training and evaluation

    def train_step(self, batch: Batch | Sequence[Batch] | None, times: list[ActionTime] | None = None) -> torch.Tensor:
        """Forward and backward of one mini-batch; gradients are added to `.grad`.

        Every process calls it; the mini-batch of the main process is used and the others may pass None.

        Args:
            batch: tensors with the same number of rows: input_ids (N, T), attention_mask (N, T), labels (N, T), -100
                where there is no target; or a sequence of such mini-batches, accumulated in one pass.
            times: where to note when each action ran on this process.

        Returns:
            The mean loss per target token of the whole mini-batch, a float tensor on every process.
        """
        batches = [batch] if isinstance(batch, Mapping) else batch
        return self.train_on(share(batches, self.topology), times)

    def train_on(self, batches: Sequence[Batch], times: list[ActionTime] | None = None) -> torch.Tensor:
        """`train_step` for mini-batches that every process already has."""
        self._check_trainable()
        self._refresh_copies()
        micro_batches = make_micro_batches(self.adapter, batches, self.num_micro_batches, self.seed, self.step)
        remaining = set(self.stages)

        def on_update(stage: int) -> None:
            remaining.discard(stage)
            if not remaining:
                self.ties.reduce_gradients()

        generator = default_generator(self.topology.device)
        state = generator.get_state()
        self._executor.run(self.schedule(len(micro_batches)), micro_batches, on_update, times)
        generator.set_state(state)
        self.step += 1
        return self._from_last_stage(self._take_loss())

    def eval_step(self, batch: Batch | None) -> Evaluation:
        """Loss of a mini-batch without gradients, row by row. Every process calls it and gets the same result."""
        (rows,) = share(None if batch is None else [batch], self.topology)
        return self.eval_on(rows)

    def eval_on(self, rows: Batch, on_logits: LogitsCallback | None = None) -> Evaluation:
        """`eval_step` for a mini-batch that every process already has.

        Args:
            rows: the mini-batch.
            on_logits: called in the process of the last stage for each micro-batch, in order, with its logits (B, T, V)
                and what the stages were given as its inputs; columns that only pad are cut off from both.
        """
        self._refresh_copies()
        micro_batches = make_micro_batches(self.adapter, [rows], self.num_micro_batches, self.seed, self.step)
        with self._in_evaluation(on_logits):
            self._executor.run(self.schedule(len(micro_batches), "forward_only"), micro_batches)
        num_rows = next(iter(rows.values())).shape[0]
        result = torch.zeros(2, num_rows, dtype=torch.float64)
        if (last := self.stages.get(self.num_stages - 1)) is not None:
            losses = [last.row_losses.pop(i) for i in range(len(micro_batches))]
            result[0] = torch.cat([loss.sums for loss in losses]).double()
            result[1] = torch.cat([loss.num_tokens for loss in losses]).double()
        result = self._from_last_stage(result)
        return Evaluation(result[0], result[1].long())

    def generate(self, **inputs: Any) -> Any:
        """What `generate` of the plain model would return: token ids, by search or sampling, with a cache.

        Every process calls it, the arguments of the main process are used and the others may pass none, and every
        process gets the same result. Sampling continues the main process's random numbers.

        Args:
            inputs: keyword arguments of transformers' GenerationMixin.generate: input_ids (B, T), attention_mask
                (B, T), max_new_tokens, num_beams, do_sample, generation_config ...

        Returns:
            Token ids of (B * num_return_sequences, T'), or with return_dict_in_generate transformers' output object.

        Raises:
            UserError: an argument is unknown, or cannot be honoured by a pipeline.
        """
        self._refresh_copies()
        with self._in_evaluation():
            return self._generator.generate(inputs)

    @cached_property
    def _generator(self) -> Generator:
        return Generator(self.adapter, self.partition, self.models, self._edges, self.topology)

    def schedule(self, num_micro_batches: int, name: str | None = None) -> Schedule:
        """The table that is run for this many micro-batches; by default the training one."""
        processes = dist.get_world_size() if dist.is_initialized() else 1
        return _table(name or self.schedule_name, self.num_stages, num_micro_batches, processes, self.recompute)

    # ------------------------------------------------------------------ parameters and gradients

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This process's parameters under their Hugging Face names; a tied one once, in the process that owns it."""
        for stage, stage_model in self.models.items():
            for name, parameter in stage_model.parameters.items():
                if self.ties.owner_stage[name] == stage:
                    yield name, parameter

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """This process's parameters, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters():
            parameter.grad = None

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their norm over the whole model is at most `max_norm`.

        Returns:
            The norm before, the same on every process; each tied parameter counts once.
        """
        parameters = [p for p in self.parameters() if p.grad is not None]
        norm = self.grad_norm()
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm.to(self.topology.device))
        return norm

    def grad_norm(self) -> torch.Tensor:
        """The 2-norm of the gradient of the whole model, a float64 tensor, the same on every process."""
        norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in self.parameters() if p.grad is not None]
        squares = torch.stack(norms).square().sum().cpu() if norms else torch.zeros((), dtype=torch.float64)
        # Summed in one fixed order: the norm does not depend on which process adds what.
        parts = torch.zeros(self.topology.num_processes, dtype=torch.float64)
        parts[self.topology.rank] = squares
        if self.topology.num_processes > 1:
            dist.all_reduce(parts)
        return parts.sum().sqrt()

    # ------------------------------------------------------------------ building

    def _materialise(self, source: Any, stage: int) -> StageModel:
        layers = self.partition[stage]
        stage_model = StageModel(self.adapter, layers[0], layers[-1] + 1)
        device = self.topology.device
        if isinstance(source, PreTrainedModel):
            if self.peft is not None and self._has_peft_layers:
                self.peft.inject(stage_model.model)
            hub.take(stage_model, source, device)
        elif isinstance(source, str | os.PathLike):
            hub.load(stage_model, source, device, self.seed)
        else:
            hub.initialise(stage_model, device, self.seed)
        if self.peft is not None and not self._has_peft_layers:
            hub.add_peft(stage_model, self.peft, device, self.seed)
        stage_model.seal(device)
        return stage_model

    def _trainable_layers(self) -> list[bool]:
        """For each layer of the whole model, whether it has a parameter that wants a gradient."""
        local: dict[int, bool] = {}
        for stage_model in self.models.values():
            for index, layer in enumerate(stage_model.layers, stage_model.start):
                modules = [stage_model.model.get_submodule(name) for name in layer.modules]
                local[index] = any(p.requires_grad for module in modules for p in module.parameters())
        flags: dict[int, bool] = {}
        for part in self.topology.gather_objects(local):
            flags.update(part)
        return [flags[i] for i in range(len(self.adapter.layers))]

    def _stage(self, stage_model: StageModel, trainable: list[bool], label_smoothing: float) -> Stage:
        flag = dict(zip(self.adapter.layers, trainable, strict=True))

        def wants_gradient(boundary: int) -> dict[str, bool]:
            sources = self.adapter.sources(boundary)
            return {name: any(flag[layer] for layer in layers) for name, layers in sources.items()}

        return Stage(
            stage_model,
            {} if stage_model.is_first else wants_gradient(stage_model.start),
            {} if stage_model.is_last else wants_gradient(stage_model.stop),
            label_smoothing,
        )

    # ------------------------------------------------------------------ between steps

    @contextmanager
    def holding_weights(self) -> Iterator[None]:
        """A scope in which no weight changes, such as an evaluation: copies of tied parameters are sent once."""
        self._holds_weights, self._copies_are_fresh = True, False
        try:
            yield
        finally:
            self._holds_weights = False

    def _refresh_copies(self) -> None:
        """Give copies of tied parameters their owner's value, which anything may have changed since."""
        if not (self._holds_weights and self._copies_are_fresh):
            self.ties.send_values()
            self._copies_are_fresh = True

    def _check_trainable(self) -> None:
        """Which gradients are sent was agreed when the pipeline was made. Raises UserError where it no longer holds."""
        for model in self.models.values():
            for name, parameter in model.parameters.items():
                if parameter.requires_grad != self._was_trainable[name]:
                    raise UserError(
                        f"{name}: requires_grad was {self._was_trainable[name]} when the Pipeline was made and is "
                        f"{parameter.requires_grad} now; freeze or unfreeze parameters before, and make it anew"
                    )

    def _take_loss(self) -> torch.Tensor:
        last = self.stages.get(self.num_stages - 1)
        if last is None:
            return torch.zeros((), dtype=torch.float64)
        assert last.loss_sum is not None
        loss, last.loss_sum = last.loss_sum, None
        return loss.double().cpu()

    def _from_last_stage(self, value: torch.Tensor) -> torch.Tensor:
        """The last stage's value on every process."""
        if self.topology.num_processes > 1:
            dist.broadcast(value, src=self.topology.process_of(self.num_stages - 1))
        return value

    @contextmanager
    def _in_evaluation(self, on_logits: LogitsCallback | None = None) -> Iterator[None]:
        """All stages in evaluation mode: no dropout."""
        for stage in self.stages.values():
            stage.model.model.eval()
            stage.on_logits = on_logits
        try:
            yield
        finally:
            for stage in self.stages.values():
                stage.model.model.train()
                stage.on_logits = None

    # ------------------------------------------------------------------ loading and saving

    def load_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Replace the weights by those of a Hub id or directory, in place, so that optimizers keep their parameters.

        Every process calls it and reads its own stages' tensors; with PEFT adapters it reads those, in PEFT's format.
        Raises CheckpointError where the files are missing or do not fit the model.
        """
        if self.peft is not None:
            load_adapters(Path(directory), self.models, self.peft)
            return
        for stage, stage_model in self.models.items():
            loaded = self._materialise(str(directory), stage)
            current = {**stage_model.parameters, **stage_model.buffers}
            with torch.no_grad():
                for name, tensor in {**loaded.parameters, **loaded.buffers}.items():
                    current[name].copy_(tensor)

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write the model in Hub format; `from_pretrained` of plain transformers loads it.

        Every process calls it and writes its own stages, one shard a stage. An interrupted save leaves the old
        checkpoint or none, never a part. With PEFT adapters only those are written, in PEFT's format.
        """
        self._refresh_copies()
        if self.peft is not None:
            save_adapters(Path(directory), self.models, self.ties.owner_stage, self.topology, self.peft)
            return
        save_model(Path(directory), self.models, self.ties.owner_stage, self.topology)


def _config_of(
    model: ModelSource,
    trust_remote_code: bool,
    overrides: Mapping[str, Any] | None,
) -> PreTrainedConfig:
    if isinstance(model, PreTrainedModel):
        return model.config
    if isinstance(model, PreTrainedConfig):
        return model
    try:
        return AutoConfig.from_pretrained(str(model), trust_remote_code=trust_remote_code, **(overrides or {}))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read a model's configuration at {str(model)!r}: {error}") from error


def _generation_config_of(
    model: ModelSource,
) -> GenerationConfig | None:
    """The defaults of `generate` that come with the model; None: those that its configuration implies."""
    if isinstance(model, PreTrainedModel):
        return copy.deepcopy(model.generation_config)
    if isinstance(model, PreTrainedConfig):
        return None
    try:
        return GenerationConfig.from_pretrained(str(model))
    except OSError:
        return None


@lru_cache(maxsize=64)
def _table(name: str, num_stages: int, num_micro_batches: int, num_processes: int, recompute: str) -> Schedule:
    placement = Placement.spread(num_stages, num_processes)
    # Recomputation of blocks happens inside B; only that of a whole stage is an action.
    return build(name, num_stages, num_micro_batches, placement, recompute="stage" if recompute == "stage" else "none")
