"""Forwards alone on the stages of a pipeline: evaluation, generation, and what a loss reads before a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch.nn import functional as F

from hf_gpipe.adapters.modules.dropout import keeping_random_numbers
from hf_gpipe.adapters.peft import without_adapters
from hf_gpipe.errors import UserError
from hf_gpipe.losses.loss import LogProbs, Loss, Reads
from hf_gpipe.model.stage_parameters import StageParameters
from hf_gpipe.pipeline.decision import Decision
from hf_gpipe.pipeline.variant import Variant
from hf_gpipe.runtime.batches import share
from hf_gpipe.runtime.cutting import Cutting, make_micro_batches
from hf_gpipe.runtime.edges import Edges
from hf_gpipe.runtime.evaluation import Evaluation
from hf_gpipe.runtime.executor import Executor
from hf_gpipe.runtime.first_pass import gathered_rows, with_comparison
from hf_gpipe.runtime.generation import Generator, check_generates
from hf_gpipe.runtime.micro_batch import Batch, LogitsCallback, MicroBatch, StepOptions
from hf_gpipe.runtime.stage import Stage
from hf_gpipe.schedule import Schedule


@dataclass(eq=False)
class Forwards:
    """The part of a pipeline that runs its stages without gradients.

    Attributes:
        decision: the model, its cut, and the tables.
        stages: of this process, by number.
        edges: at the ends of these stages.
        cutting: of mini-batches in training; in evaluation the number of micro-batches alone counts.
        has_new_adapters: whether the model before its training is there, as the model without its PEFT adapters.
        reference: gives log-probabilities by the model before its training, where that is in memory otherwise.
    """

    decision: Decision
    parameters: StageParameters
    stages: dict[int, Stage]
    edges: Edges
    executor: Executor
    cutting: Cutting
    has_new_adapters: bool
    reference: LogProbs | None = None

    def __post_init__(self) -> None:
        self.adapter, self.world = self.decision.adapter, self.decision.world
        self._num_evaluations = 0

    def eval_step(self, batch: Batch | None) -> Evaluation:
        """Compute the loss of each row of a mini-batch, without gradients and without dropout.

        Every process calls it and gets the same result. The main process gives the mini-batch, as for `train_step`; the
        others may pass None.
        """
        (rows,) = share(None if batch is None else [batch], self.world)
        return self.eval_on(rows)

    def eval_on(self, rows: Batch, on_logits: LogitsCallback | None = None) -> Evaluation:
        """`eval_step` for a mini-batch that every process already has.

        Args:
            rows: the mini-batch; the documents of a flattened one are its rows.
            on_logits: called in the process that has the micro-batch on the last stage, in order, with its logits
                (B, T, V) and its inputs; columns of padding are cut off from both.
        """
        rows = self.decision.loss.with_passes(self.adapter.as_rows(rows), self.log_probs, self.reference_log_probs)
        return self._evaluate(rows, StepOptions(on_logits=on_logits))

    def log_probs(self, rows: Batch, *, with_adapters: bool = True) -> torch.Tensor:
        """Compute the log-probability of each row of a mini-batch: the sum over its targets, without dropout.

        Every process calls it with the same mini-batch and gets the same result.

        Args:
            rows: the mini-batch, as for `train_step`.
            with_adapters: whether the PEFT adapters are on; without them it is the log-probability by the base model.

        Returns:
            (N,) in float64, on the CPU.
        """
        with self._adapters_off(not with_adapters):
            return self._evaluate(self.adapter.as_rows(rows), StepOptions(is_likelihood_only=True)).row_nll.neg()

    def embed(self, rows: Batch) -> torch.Tensor:
        """Compute the embeddings of the rows of a mini-batch, by the pipeline's `EmbeddingLoss`, without dropout.

        Every process calls it with the same mini-batch and gets the same result.

        Returns:
            (N, D) in float64, on the CPU.

        Raises:
            UserError: the pipeline has another loss.
        """
        if type(self.decision.loss).embed is Loss.embed or Reads.TOKENS in self.decision.loss.reads:
            raise UserError(
                f"embed: the loss is a {type(self.decision.loss).__name__}, which reads no embeddings; give the "
                "Pipeline loss=EmbeddingLoss() of hf_gpipe"
            )
        return self._gathered(rows, StepOptions(is_first_pass=True))

    def token_log_probs(self, rows: Batch, *, with_adapters: bool = True) -> torch.Tensor:
        """Compute the log-probability of the target after each position of a mini-batch, without dropout.

        Every process calls it with the same mini-batch and gets the same result.

        Args:
            rows: the mini-batch, of a decoder-only model.
            with_adapters: whether the PEFT adapters are on.

        Returns:
            (N, T) in float64, on the CPU, 0 where there is no target. The logits are those that the loss reads, which
            may be clipped or divided by a temperature.
        """
        with self._adapters_off(not with_adapters):
            return self._gathered(rows, StepOptions(gives_log_probs=True), rows["labels"].shape[1])

    def _gathered(self, rows: Batch, options: StepOptions, length: int = 0) -> torch.Tensor:
        """The tensor (N, E) that the loss reads of each row in evaluation, filled up with 0, on every process."""
        micro_batches = self._in_micro_batches(rows)
        with self._in_evaluation():
            own = self._rows(micro_batches, options)
        own = {index: F.pad(values, (0, max(0, length - values.shape[1]))) for index, values in own.items()}
        return gathered_rows(own if self.world.place == 0 else {}, micro_batches, self.world.all_reduce)

    @contextmanager
    def _adapters_off(self, is_off: bool) -> Iterator[None]:
        """Context manager in which the PEFT adapters, if any, add nothing."""
        with ExitStack() as disabled:
            if self.adapter.peft is not None and is_off:
                for stage in self.parameters.models.values():
                    disabled.enter_context(without_adapters(stage.model))
            yield

    def reference_log_probs(self, rows: Batch) -> torch.Tensor:
        """`log_probs` by the model before its training. Raises UserError where that model is gone."""
        if self.reference is not None:
            return self.reference(rows)
        if not self.has_new_adapters:
            raise UserError(
                "the loss needs the log-probabilities of the model before its training, and without new PEFT adapters, "
                "which could be turned off, that model is gone; compute them first, by Pipeline.log_probs, and give "
                "them as the entry 'ref_logps' of each mini-batch"
            )
        return self.log_probs(rows, with_adapters=False)

    def _in_micro_batches(self, rows: Batch) -> list[MicroBatch]:
        """The micro-batches of a mini-batch in evaluation."""
        self.parameters.ties.refresh_copies()
        # Its number names its mini-batch in metrics; there is no dropout to seed.
        self._num_evaluations += 1
        how = Cutting(self.cutting.num_micro_batches), self.parameters.seed, self._num_evaluations
        return make_micro_batches(self.adapter, [rows], *how, loss=self.decision.loss)

    def _evaluate(self, rows: Batch, options: StepOptions) -> Evaluation:
        micro_batches = self._in_micro_batches(rows)
        with self._in_evaluation():
            if not options.is_likelihood_only:
                with torch.no_grad():
                    micro_batches = self.compared(micro_batches)
            outputs = self.executor.run(self._table(len(micro_batches)), micro_batches, options).outputs
        outputs = outputs if self.world.place == 0 else {}  # the ranks of a worker have the same
        return Evaluation.gathered(outputs, [micro_batch.num_rows for micro_batch in micro_batches], self.world)

    def generate(self, **inputs: Any) -> Any:
        """Generate token ids as the plain model's `generate` does: by search or sampling, with a cache.

        Every process calls it and gets the same result. The main process gives the arguments; the others may pass none.
        Sampling continues the main process's random numbers.

        Args:
            inputs: keyword arguments of transformers' GenerationMixin.generate: input_ids (B, T), attention_mask
                (B, T), max_new_tokens, num_beams, do_sample, generation_config ...

        Returns:
            Token ids of (B * num_return_sequences, T'), or with return_dict_in_generate transformers' output object.

        Raises:
            UserError: an argument is unknown or not supported.
        """
        self.parameters.ties.refresh_copies()
        with self._in_evaluation():
            return self.generator.generate(inputs)

    @cached_property
    def generator(self) -> Generator:
        """Runs `generate` on the stages of this process.

        Raises UnsupportedModelError, on every process, where a tiny clone in stages would generate something else.
        """
        check_generates(self.adapter)
        # The clone has as many stages as the model has, but at most three.
        variant = Variant(min(3, self.decision.config.num_stages), generates=True)
        self.world.from_main(lambda: self.decision.probe.require(self.adapter, variant))
        models, partition = self.parameters.models, self.decision.partition
        return Generator(self.adapter, partition, models, self.edges, self.world, [*self.executor.modes.values()])

    @contextmanager
    def _in_evaluation(self) -> Iterator[None]:
        """Context manager that sets all stages to evaluation mode, without dropout."""
        for stage in self.stages.values():
            stage.model.model.eval()
        try:
            yield
        finally:
            for stage in self.stages.values():
                stage.model.model.train()

    def compared(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with what a first pass finds, where their loss compares units."""
        if not any(micro_batch.loss.compares_units for micro_batch in micro_batches):
            return micro_batches
        last = self.decision.config.num_stages - 1
        with self.keeping_random_state():
            own = self._rows(micro_batches, StepOptions(is_first_pass=True))
        if last not in self.stages:
            return micro_batches
        rows = gathered_rows(own, micro_batches, partial(self.parameters.replicas.total, last))
        dtype = next((vectors.dtype for vectors in own.values()), rows.dtype)
        return with_comparison(micro_batches, rows.to(dtype), self.stages[last].device)

    def _rows(self, micro_batches: list[MicroBatch], options: StepOptions) -> dict[int, torch.Tensor]:
        """The rows of each micro-batch as the loss reads them, (B, E), by its number, where this process has it."""
        outputs = self.executor.run(self._table(len(micro_batches)), micro_batches, options).outputs
        return {index: output["rows"] for index, output in outputs.items()}

    def _table(self, num_micro_batches: int) -> Schedule:
        """The table of forwards alone."""
        names = (kind.evaluation for kind in self.decision.full_table.kinds if kind.evaluation is not None)
        return self.decision.schedule(num_micro_batches, next(names, "forward_only"))

    def keeping_random_state(self) -> AbstractContextManager[None]:
        """Context manager after which the devices' generators are as before: dropout seeds them."""
        return keeping_random_numbers(self.world.stage_devices.values())
