"""Generation by transformers' own `generate`, run in lock-step by every process of the pipeline.

Each process runs `generate` on an object of the model's own class without weights. Its forward runs the stages one
after another, and the logits of the last position come back to every process, so that all of them search or sample the
same tokens without further messages. The encoder runs once; then `generate` itself repeats its output for
beams. Nothing is pipelined: a token depends on the token before it, so a stage waits while the others work. Replicas
generate different rows (`spread_rows.py`); each pipeline of replicas runs in a lock-step of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from hf_gpipe.adapters import Adapter, StageModel
from hf_gpipe.adapters.base import Inputs
from hf_gpipe.adapters.cache import PipelineCache
from hf_gpipe.adapters.layers import StackName
from hf_gpipe.adapters.modules.dropout import default_generator
from hf_gpipe.adapters.modules.intercept import extend_class
from hf_gpipe.adapters.text import check_reads_text
from hf_gpipe.errors import StageError, UserError
from hf_gpipe.libraries.transformers import ModelOutput, cache_argument
from hf_gpipe.runtime.channel import Channel
from hf_gpipe.runtime.edges import Edges
from hf_gpipe.runtime.generate_arguments import GenerateArguments
from hf_gpipe.runtime.mesh import Mesh
from hf_gpipe.runtime.spread_rows import joined, part_of, pipelines
from hf_gpipe.runtime.step import ModeState


def check_generates(adapter: Adapter) -> None:
    """Raise UserError where a model has no head for tokens."""
    check_reads_text(adapter, "generate")
    if adapter.labels_rows:
        raise UserError(
            f"{type(adapter.reference).__name__} has no head for tokens, and cannot generate; leave "
            "predict_with_generate out, and use evaluate or predict of the trainer, or eval_step of the Pipeline"
        )


class Generator:
    """Runs `generate` for the stages of this process.

    Args:
        adapter: the whole model; its `reference.generation_config` gives the defaults.
        stages: the stages of this process, by number.
        edges: the edges at the ends of these stages.
        modes: the states of modes in the executor of these stages.
    """

    def __init__(
        self,
        adapter: Adapter,
        partition: Sequence[range],
        stages: Mapping[int, StageModel],
        edges: Edges,
        world: Mesh,
        modes: Collection[ModeState],
    ) -> None:
        check_generates(adapter)
        self.adapter = adapter
        self._stages = stages
        self._edges = edges
        self.world = world
        self._modes = modes
        #: The stage that holds each stack's last layer.
        self._last = {adapter.layers[i].stack: stage for stage, layers in enumerate(partition) for i in layers}
        self._model = _in_lock_step(self)
        self._pipelines = pipelines(world.placement)
        self._arguments = GenerateArguments(adapter, self._model, world, len(self._pipelines))
        several = self._pipelines if len(self._pipelines) > 1 else ()
        self._groups = [world.new_group(tuple(map(world.peer, workers)), world.device) for workers in several]
        #: The pipeline that this process is in during a call, and the group of its processes; None: all processes.
        self._number = 0
        self.group: dist.ProcessGroup | None = None

    @property
    def device(self) -> torch.device:
        return self.world.device

    @functools.cached_property
    def _cache_name(self) -> str:
        return cache_argument(self._model)

    @torch.no_grad()
    def generate(self, inputs: Mapping[str, Any]) -> Any:
        """Return the result of the whole model's `GenerationMixin.generate`, on every process.

        Args:
            inputs: keyword arguments of `generate`. Every process uses those of the main process, and only that process
                uses a streamer. Objects, such as a logits processor or a tokenizer, cannot be sent: each process uses
                its own objects, which must compute the same.

        Raises:
            UserError: on every process, if an argument is unknown or not supported, or a process has no such object.
            StageError: the forward of a stage failed.
        """
        streamer = inputs.get("streamer") if self.world.is_main else None
        shared, num_parts = self._arguments.shared(inputs)
        self._share_random_state()
        if num_parts == 1:
            self._number, self.group = 0, None
            return self._generated(shared, streamer)
        tokens, parts = None, self._pipelines[:num_parts]
        own = next((i for i, workers in enumerate(parts) if self.world.worker in workers), None)
        if own is not None:
            self._number, self.group = own, self._groups[own]
            tokens = self._generated(part_of(shared, own, num_parts)).cpu()
        everyone = self.world.gather_objects(tokens)
        firsts = [self.world.peer(workers[0]) for workers in parts]
        of_pipelines = [part for rank in firsts if (part := everyone[rank]) is not None]
        return joined(of_pipelines, lambda name: self._arguments.setting(shared, name)).to(self.device)

    def _generated(self, shared: Mapping[str, Any], streamer: Any = None) -> Any:
        """The result of `generate` for the rows of one pipeline, in each of its processes."""
        arguments = {n: v.to(self.device) if isinstance(v, torch.Tensor) else v for n, v in shared.items()}
        if self._arguments.setting(arguments, "use_cache") is not False:
            arguments[self._cache_name] = PipelineCache(self._stages)
        output = self._model.generate(**arguments, streamer=streamer)
        if isinstance(output, ModelOutput):
            # The cache has only this process's part, which is useless to the caller.
            output = type(output)(**{name: value for name, value in output.items() if name != self._cache_name})
        return output

    # ------------------------------------------------------------------ what the model in lock-step calls

    def encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> BaseModelOutput:
        """The encoder's output (B, S, D) on every process.

        Args:
            input_ids: (B, S).
            attention_mask: (B, S).
        """
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        outputs = self._run("encoder", inputs, None)
        hidden = outputs.get("encoder_hidden")
        if hidden is None:
            shape = (*input_ids.shape, self.adapter.config.hidden_size)
            # Every layer after the encoder receives it in this type.
            dtype = self.adapter.carry_dtype(-1, "encoder_hidden")
            hidden = torch.empty(shape, dtype=dtype, device=self.device)
        return BaseModelOutput(last_hidden_state=self.from_last("encoder", hidden))

    def decode(self, inputs: dict[str, Any]) -> CausalLMOutputWithPast:
        """The logits of the last position, float32 of (B, 1, V), on every process.

        Args:
            inputs: arguments of the model's forward; ids of (B, T), where T is 1 except for the prompt.
        """
        cache = None
        if inputs.get("use_cache"):
            cache = inputs.pop(self._cache_name, None)
            if cache is None:
                # The model dropped it and gives the whole text again, as with longrope where its rotations change.
                cache = PipelineCache(self._stages)
        ids = inputs["decoder_input_ids" if self.adapter.config.is_encoder_decoder else "input_ids"]
        self._check_positions(ids.shape[1] + (0 if cache is None else cache.get_seq_length()), inputs)
        outputs = self._run("decoder", inputs, cache)
        if cache is not None:
            cache.advance(ids.shape[1])
        for mode in self._modes:
            if (of_mode := mode.next_logits(self, outputs, inputs, len(ids))) is not None:
                return self._output(of_mode, cache)
        if "logits" in outputs:
            # `generate` would convert them to float32 next; done here, the dtype of the broadcast is known everywhere.
            logits = outputs["logits"][:, -1:].float().contiguous()
        else:
            vocabulary = self.adapter.reference.get_output_embeddings().weight.shape[0]
            logits = torch.empty(ids.shape[0], 1, vocabulary, device=self.device)
        return self._output(self.from_last("decoder", logits), cache)

    def _output(self, logits: torch.Tensor, cache: PipelineCache | None) -> CausalLMOutputWithPast:
        """The output of the model in lock-step."""
        return CausalLMOutputWithPast(logits=logits, **({} if cache is None else {self._cache_name: cache}))

    def _check_positions(self, length: int, inputs: Mapping[str, Any]) -> None:
        """Raise UserError if a text of `length` tokens, padding included, has more tokens than the model positions."""
        most = self.adapter.num_positions.get("decoder", length)
        mask = None if self.adapter.config.is_encoder_decoder else inputs.get("attention_mask")
        if length > most and mask is not None and mask.dim() == 2:
            length = int(mask.sum(dim=1).max())
        if length > most:
            raise UserError(
                f"a text has {length} tokens with those that are generated, and the model has positions for {most}; "
                "use a smaller max_new_tokens, or shorter texts"
            )

    # ------------------------------------------------------------------ the stages

    def _run(self, stack: StackName, inputs: Inputs, cache: PipelineCache | None) -> dict[str, torch.Tensor]:
        """Run this process's stages of one stack; returns the outputs of the stack's last stage, elsewhere {}."""
        channels = [edge.down for edge in self._edges.values()]
        for channel in channels:
            channel.check()
        outputs: dict[str, torch.Tensor] = {}
        for number, stage in self._stages.items():
            if not stage.runs(stack) or not self.runs(number):
                continue
            given = {n: v.to(stage.device) if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
            if cache is not None:
                given[self._cache_name] = cache.of_stage[number]
            try:
                carry = {}
                if not self._begins(stage, stack):
                    before = self._channel(number - 1)
                    before.expect(self._number, self._shapes(stage.start, inputs))
                    carry = before.receive(self._number)
                with ExitStack() as used:
                    for mode in self._modes:
                        used.enter_context(mode.using(number))
                    outputs = stage(given, carry)
                if number < self._last[stack]:
                    self._channel(number).send(self._number, outputs, self._shapes(stage.stop, inputs))
                    outputs = {}
            except Exception as error:
                for channel in channels:
                    channel.reset()
                raise StageError(
                    f"process {self.world.rank}, stage {number}, generation in the {stack}: "
                    f"{type(error).__name__}: {error}"
                ) from error
        for channel in channels:
            channel.flush()
        return outputs

    def _begins(self, stage: StageModel, stack: StackName) -> bool:
        """Whether the stack's first layer is on this stage."""
        return any(layer.stack == stack and layer.kind == "embedding" for layer in stage.layers)

    def _shapes(self, boundary: int, inputs: Inputs) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that cross a boundary."""
        shapes = self.adapter.carry_shapes(boundary, inputs)
        keep = inputs.get("logits_to_keep", 0)
        if keep and self.adapter.layers[boundary].kind == "head":
            # The model cuts the prompt's other positions off before its head.
            rows, length, width = shapes["hidden"]
            shapes["hidden"] = (rows, min(length, keep), width)
        return shapes

    def from_last(self, stack: StackName, value: torch.Tensor) -> torch.Tensor:
        """Broadcast `value` from the process with the stack's last stage to all processes of the pipeline."""
        value, worker = value.to(self.device), self._worker_of(self._last[stack])
        if self.group is None:
            self.world.broadcast(value, self.world.placement.ranks_of(worker)[0])
        else:
            source = self.world.peer(worker)
            dist.broadcast(value, group_src=dist.get_group_rank(self.group, source), group=self.group)
        return value

    def _channel(self, stage: int) -> Channel:
        """The channel from a stage to the next stage, in this process's pipeline."""
        return self._edges[stage, self._worker_of(stage), self._worker_of(stage + 1)].down

    def runs(self, stage: int) -> bool:
        """Whether this process runs a stage in its pipeline."""
        return self._worker_of(stage) in self.world.workers

    def _worker_of(self, stage: int) -> int:
        """The worker that runs a stage in this process's pipeline."""
        return self.world.placement.workers[stage][self._number]

    def _share_random_state(self) -> None:
        """Use the main process's random state on every process, so that all sample the same tokens."""
        if self.world.num_processes > 1:
            generator = default_generator(self.device)
            state = generator.get_state()
            self.world.broadcast(state, self.world.main)
            generator.set_state(state)


class _Encoder:
    """Replaces the model's encoder in `generate`, which chooses arguments by the signature of its forward."""

    def __init__(self, forward: Callable[..., BaseModelOutput]) -> None:
        self.forward = forward

    def __call__(self, **inputs: Any) -> BaseModelOutput:
        return self.forward(inputs["input_ids"], inputs.get("attention_mask"))


class _LockStep:
    """Mixed into the model's own class: sends the calls of `generate` to the pipeline."""

    _pipeline: Generator

    @property
    def device(self) -> torch.device:
        return self._pipeline.device

    def get_encoder(self, *args: Any, **kwargs: Any) -> _Encoder:
        return _Encoder(self._pipeline.encode)


def _in_lock_step(generator: Generator) -> PreTrainedModel:
    """An object of the model's class, without weights, whose forward is the pipeline's."""
    model = generator.adapter.skeleton()

    # `generate` chooses arguments by the signature of the model's forward.
    @functools.wraps(model.forward)
    def forward(**inputs: Any) -> CausalLMOutputWithPast:
        return generator.decode(inputs)

    model.forward = forward
    model._pipeline = generator
    extend_class(model, _LockStep)
    model.generation_config = generator.adapter.reference.generation_config
    return model.eval()
