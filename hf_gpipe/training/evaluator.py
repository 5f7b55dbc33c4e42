"""Metrics and predictions of a dataset, as transformers' Trainer gives them."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from transformers import EvalPrediction

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.errors import UserError
from hf_gpipe.libraries.transformers_trainer import PredictionOutput, denumpify_detensorize, speed_metrics
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.generating import Generation, generation_options
from hf_gpipe.training.loader import Batch
from hf_gpipe.training.predicting import Predicted, concatenated, from_last_stage, mean_loss, predict
from hf_gpipe.training.trainer_interface import TrainerInterface, in_lists

logger = transformers.logging.get_logger(__name__)


class Evaluator:
    """Evaluates a trainer's model on mini-batches. Every process makes one and calls it; all get the same results.

    Args:
        trainer: the trainer, whose arguments and functions count as they are now.
        prefix: the text before the metrics' names.
        options: keyword arguments of `generate`, with `predict_with_generate`.
    """

    def __init__(self, trainer: TrainerInterface, prefix: str, options: Mapping[str, Any]) -> None:
        self._trainer, self._args, self._pipe = trainer, trainer.args, trainer.pipe
        self._prefix, self._options = prefix, options

    def evaluate(self, batches: Iterable[Batch] | None) -> dict[str, float]:
        """Loss, metrics of `compute_metrics` and speed; `batches` are read in the main process, others may pass None.

        `compute_metrics` is called in the last stage's leader, which gets all logits.
        """
        predicts = self._trainer.compute_metrics is not None and not self._args.prediction_loss_only
        return self._run(batches, predicts=predicts, keeps=False)[1]

    def predict(self, batches: Iterable[Batch] | None) -> PredictionOutput:
        """Predictions, labels if there are any, and the metrics; `batches` as for `evaluate`."""
        rows, metrics = self._run(batches, predicts=not self._args.prediction_loss_only, keeps=True)
        mine = self._arrays(rows)[:2] if rows else (None, None)
        return PredictionOutput(*from_last_stage(self._pipe, mine), metrics)

    def _run(
        self, batches: Iterable[Batch] | None, *, predicts: bool, keeps: bool
    ) -> tuple[list[_Rows], dict[str, Any]]:
        """The rows with their predictions, in the last stage's leader, and the metrics.

        Args:
            batches: the mini-batches, as for `evaluate`.
            predicts: whether there are predictions.
            keeps: whether predictions are kept after `compute_metrics` has seen them mini-batch by mini-batch.
        """
        trainer, args, pipe, prefix = self._trainer, self._args, self._pipe, self._prefix
        trainer.metrics_of_loss(is_training=False)  # metrics of other calls do not belong to this evaluation
        pad_token_id = pipe.world.from_main(lambda: getattr(trainer.processing_class, "pad_token_id", None))
        start_time = time.time()
        generation = None
        if predicts and args.predict_with_generate:
            generation = Generation(pipe, generation_options(args, self._options), pad_token_id)
        computes = predicts and trainer.compute_metrics is not None
        in_parts = computes and args.batch_eval_metrics
        has_predictions = predicts and pipe.world.leads(pipe.num_stages - 1)
        self._fill = IGNORED_LABEL if generation is None else generation.pad_token_id
        rows: list[_Rows] = []
        computed: dict[str, Any] = {}
        losses, num_rows, has_labels = [], [], True
        results = predict(
            pipe,
            batches,
            with_logits=predicts and generation is None,
            needs_labels=not keeps,
            preprocess=trainer.preprocess_logits_for_metrics,
            generation=generation,
            prepared=lambda batch: trainer.prepared([batch], is_training=False)[0],
        )
        for predicted in results:
            losses.append(predicted.evaluation.loss)
            num_rows.append(len(predicted.evaluation.row_nll) // pipe.loss.dataset_loss(predicted.batch).rows_per_unit)
            has_labels = has_labels and predicted.has_labels
            if has_predictions:
                part = self._rows_of(predicted)
                if keeps or not in_parts:
                    rows.append(part)
                if in_parts and has_labels:
                    computed |= self._computed([part], compute_result=predicted.is_last)
            trainer.fire("on_prediction_step")
        metrics: dict[str, Any] = {}
        if losses and has_labels:
            metrics[f"{prefix}_loss"] = mean_loss(losses, num_rows, only_finite=args.logging_nan_inf_filter)
        of_loss = trainer.metrics_of_loss(is_training=False)
        metrics |= of_loss if has_labels else {}
        if computes and has_labels:
            if rows and not in_parts:
                computed = self._computed(rows)
            # As in transformers' Trainer, "loss" of compute_metrics replaces the loss, and "eval_loss" does not.
            own = from_last_stage(pipe, computed)
            metrics |= {name: value for name, value in own.items() if name != f"{prefix}_loss"}
        metrics = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in metrics.items()}
        steps = math.ceil(sum(num_rows) / args.per_device_eval_batch_size)
        metrics |= speed_metrics(prefix, start_time, num_samples=sum(num_rows), num_steps=steps)
        # Every process measured the speed for itself.
        return rows, pipe.world.broadcast_value(metrics, pipe.world.main)

    def _computed(self, rows: Sequence[_Rows], **options: bool) -> dict[str, Any]:
        """The metrics of `compute_metrics`, in the process that has the predictions."""
        assert self._trainer.compute_metrics is not None
        # As in transformers' Trainer, one mini-batch is in tensors, and all of them are in arrays.
        predictions, labels, inputs, row_losses = map(_tensors, rows[0]) if options else self._arrays(rows)
        prediction = EvalPrediction(
            predictions=predictions,
            label_ids=labels,
            inputs=inputs,
            losses=row_losses if "loss" in self._args.include_for_metrics else None,
        )
        return in_lists(denumpify_detensorize(self._trainer.compute_metrics(prediction, **options)) or {})

    def _rows_of(self, predicted: Predicted) -> _Rows:
        evaluation, batch = predicted.evaluation, predicted.batch
        return _Rows(
            predicted.logits if predicted.tokens is None else predicted.tokens,
            batch["labels"].numpy() if predicted.has_labels else None,
            self._pipe.adapter.main_input(batch).numpy() if "inputs" in self._args.include_for_metrics else None,
            (evaluation.row_nll / evaluation.row_tokens.clamp(min=1)).numpy(),
        )

    def _arrays(self, rows: Sequence[_Rows]) -> tuple[Any, ...]:
        """Predictions, labels, inputs and losses of all rows, each as one array or as a list with the mini-batches."""
        columns = (list(column) for column in zip(*rows, strict=True))
        predictions, *others = (None if any(one is None for one in column) else column for column in columns)
        if not self._args.eval_do_concat_batches:
            return predictions, *others
        return concatenated(predictions or [], self._fill), *(other and concatenated(other) for other in others)


def _tensors(arrays: Any) -> Any:
    """The tensors that share memory with an array or with those of a tuple; None stays."""
    if isinstance(arrays, tuple):
        return tuple(map(_tensors, arrays))
    return None if arrays is None else torch.from_numpy(arrays)


class _Rows(NamedTuple):
    """The rows of a mini-batch, as arrays in the last stage's leader."""

    predictions: Any
    """Logits (rows, ...), what `preprocess` left of them, or generated tokens (rows, T')."""
    labels: Any
    """(rows, T); None where the mini-batch has none."""
    inputs: Any
    """The entry that the model reads first, such as token ids (rows, S); None where it was not asked for."""
    row_losses: Any
    """The mean negative log-likelihood of each row, (rows,)."""


def check_metrics(args: PipelineTrainingArguments, compute_metrics: Callable[..., Any] | None) -> None:
    """Raise UserError where `compute_metrics` cannot be called as the arguments ask for."""
    if not args.batch_eval_metrics or compute_metrics is None:
        return
    if "compute_result" not in inspect.signature(compute_metrics).parameters:
        raise UserError(
            "batch_eval_metrics=True calls compute_metrics for each mini-batch, with compute_result=True for the "
            "last; give the function that parameter, or leave batch_eval_metrics out"
        )


def check_evaluations(trainer: TrainerInterface, *, has_own_rows: bool) -> None:
    """Raise UserError where the training would evaluate without a dataset, or choose its best model by nothing.

    Args:
        trainer: the trainer, before its training.
        has_own_rows: whether a subclass evaluates in its own way, and may need no dataset.
    """
    args, world = trainer.args, trainer.world
    if args.metric_for_best_model is None and (args.save_strategy == "best" or args.load_best_model_at_end):
        asked = "load_best_model_at_end=True" if args.load_best_model_at_end else "save_strategy='best'"
        raise UserError(f"{asked} needs metric_for_best_model, the metric that decides, such as 'loss'; give it")
    if args.save_strategy == "best" and args.eval_strategy == "no" and world.is_main:
        logger.warning(
            "save_strategy='best' saves after evaluations, and eval_strategy='no' asks for none; give eval_strategy"
        )
    if args.eval_strategy == "no" or has_own_rows:
        return
    if not world.from_main(lambda: trainer.eval_dataset is not None):
        strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
        raise UserError(f"eval_strategy={strategy!r} requires an eval_dataset; give one, or leave eval_strategy out")


def metric_of(args: PipelineTrainingArguments, metrics: Mapping[str, float]) -> float:
    """The metric that decides which model is best. Raises UserError where it is not among `metrics`."""
    name = args.metric_for_best_model or "loss"
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        raise UserError(f"metric_for_best_model: {name!r} is not among the metrics {', '.join(metrics)}")
    return metrics[name]


def note_best(trainer: TrainerInterface, metrics: Mapping[str, float]) -> bool:
    """Note metrics that are the best so far in the state. Returns whether they are, which NaN never is."""
    args, state = trainer.args, trainer.state
    if args.metric_for_best_model is None:
        return False
    if state.best_metric is None or math.isnan(state.best_metric):
        # As in Trainer: early stopping counts an evaluation that is not better than this.
        state.best_metric = -math.inf if args.greater_is_better else math.inf
    value, best = metric_of(args, metrics), state.best_metric
    if not (value > best if args.greater_is_better else value < best):
        return False
    state.best_metric, state.best_global_step = value, state.global_step
    return True
