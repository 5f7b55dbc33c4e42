"""What every part of the trainer stands on: its arguments, callbacks, logs and data, the same in every process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import (
    DataCollatorWithPadding,
    DefaultFlowCallback,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    default_data_collator,
    enable_full_determinism,
    set_seed,
)
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, ExportableState
from transformers.trainer_utils import speed_metrics

from hf_gpipe.errors import UserError
from hf_gpipe.pipeline import ModelSource, Pipeline
from hf_gpipe.planner.settings import PlanInputs
from hf_gpipe.planner.workload import Workload
from hf_gpipe.runtime.job import Job
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.generating import generation_config_of
from hf_gpipe.training.hub import HubUploads
from hf_gpipe.training.inspection import InspectedTrainer
from hf_gpipe.training.loader import Batch, MiniBatches
from hf_gpipe.training.longest import longest_mini_batch
from hf_gpipe.training.loss_scaling import LossScaler
from hf_gpipe.training.master_weights import MasterWeights
from hf_gpipe.training.optim import check_optimizer
from hf_gpipe.training.predicting import Preprocess
from hf_gpipe.training.progress import MetricsFile, ProgressBar
from hf_gpipe.training.stopping import StopRequest

#: The decisions that callbacks take.
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class TrainerBase(InspectedTrainer):
    """The constructor of `PipelineTrainer`, whose documentation says what the arguments mean, and shared helpers."""

    def __init__(
        self,
        model: Pipeline | ModelSource | None = None,
        args: PipelineTrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Batch] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], PreTrainedModel] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Preprocess | None = None,
    ) -> None:
        self._check_overrides()
        self.args = args if args is not None else PipelineTrainingArguments()
        if not isinstance(self.args, PipelineTrainingArguments):
            raise UserError(f"args is a {type(args).__name__}; PipelineTrainer needs PipelineTrainingArguments")
        # They may have been changed since, by args.set_training(...) and the like.
        self.args.check()
        transformers.logging.set_verbosity(self.args.get_process_log_level())
        if compute_loss_func is not None:
            raise UserError("compute_loss_func is not supported: the loss is computed in the last stage, over tokens")
        if (model is None) == (model_init is None):
            raise UserError("give either model or model_init")
        seed = enable_full_determinism if self.args.full_determinism else set_seed
        seed(self.args.seed)
        self.job = Job.join(self.args.ddp_timeout)
        self.model_init = model_init
        self.pipe = _pipeline(self.call_model_init() if model is None else model, self.args, train_dataset)
        self.topology = self.pipe.topology
        if self.args.generation_config is not None:
            self.pipe.adapter.reference.generation_config = generation_config_of(self.args.generation_config)
        self.scaler = _loss_scaler(self.pipe)
        self.master_weights = (
            MasterWeights(dict(self.pipe.named_parameters())) if self.args.fp32_master_weights else None
        )
        self.processing_class = processing_class
        self.data_collator = data_collator or _default_collator(processing_class)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer = optimizers[0]
        self.lr_scheduler: Any = optimizers[1]
        if self.optimizer is not None:
            check_optimizer(self.optimizer, self.pipe.parameters())
            if self.master_weights is not None:
                raise UserError(
                    "optimizers: fp32_master_weights needs an optimizer that the trainer makes; leave one out"
                )
        elif self.lr_scheduler is not None:
            raise UserError("optimizers: a scheduler needs its optimizer; give both or leave both out")
        self._makes_scheduler = self.lr_scheduler is None
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs

        defaults = [DefaultFlowCallback, MetricsFile, *get_reporting_integration_callbacks(self.args.report_to)]
        show = PrinterCallback if self.args.disable_tqdm else ProgressBar
        self.callback_handler = CallbackHandler(
            [*defaults, *(callbacks or []), show],
            self.model,
            processing_class,
            self.optimizer,
            self.lr_scheduler,
        )
        self.uploads = HubUploads(self.args, self.topology)
        if self.args.push_to_hub:
            self.init_hf_repo()
        self.control = TrainerControl()
        self.state = self._new_state()
        #: While a training listens to signals, and the signal on which all processes have agreed to stop; 0: none.
        self._stop_request: StopRequest | None = None
        self._stop_signal = 0
        #: Tokens that earlier trainings had seen.
        self._first_num_tokens = 0
        self._num_parameters = self.pipe.adapter.reference.num_parameters(exclude_embeddings=True)
        self._fire("on_init_end")

    def _check_overrides(self) -> None:
        """Raise UserError where a subclass has a method that would not be called."""
        raise NotImplementedError

    def _check_surface(self) -> None:
        """Raise UserError for an override, or for a parameter of `model`, that came since and would not be used."""
        self._check_overrides()
        self.pipe.model  # noqa: B018  # the property checks

    def call_model_init(self, trial: Any = None) -> Any:
        """What `model_init` makes; it may take one argument, which is None here, for there are no trials."""
        assert self.model_init is not None
        return self.model_init(*[trial] * len(inspect.signature(self.model_init).parameters))

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository on the Hub, unless it exists. Every process calls it.

        Raises UserError, in every process, where the Hub refuses.
        """
        self.uploads.create(token, private)

    # ------------------------------------------------------------------ callbacks and logs

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add metrics to the state's history and give them to the callbacks of this process.

        Args:
            logs: the metrics.
            start_time: of the training; with `include_num_input_tokens_seen` the tokens per second are added.
        """
        logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            seen = logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                logs |= speed_metrics("train", start_time, num_tokens=seen - self._first_num_tokens)
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._fire("on_log", logs=logs)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback, an instance or a class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Remove the first callback that is, or is of, `callback`, and return it."""
        popped: TrainerCallback | None = self.callback_handler.pop_callback(callback)
        return popped

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove the first callback that is, or is of, `callback`."""
        self.callback_handler.remove_callback(callback)

    def _fire(self, event: str, **kwargs: Any) -> None:
        self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control, **kwargs)

    def _stateful(self) -> list[Any]:
        return [cb for cb in [*self.callback_handler.callbacks, self.control] if isinstance(cb, ExportableState)]

    def _new_state(self) -> TrainerState:
        return TrainerState(
            is_local_process_zero=self.args.local_process_index == 0,
            is_world_process_zero=self.topology.is_main,
            stateful_callbacks=self._stateful(),
            train_batch_size=self.args.per_device_train_batch_size,
        )

    # ------------------------------------------------------------------ data and processes

    def _train_batches(self, dataset: Any) -> MiniBatches:
        args = self.args
        return replace(
            self._batches(dataset, args.per_device_train_batch_size, args.train_sampling_strategy),
            drop_last=args.dataloader_drop_last,
            batch_tokens=args.batch_tokens,
            temperature=args.sampling_temperature,
        )

    def _eval_batches(self, dataset: Any) -> MiniBatches:
        return self._batches(dataset, self.args.per_device_eval_batch_size)

    def _batches(self, dataset: Any, batch_size: int, order: str = "sequential") -> MiniBatches:
        columns = None
        if self.args.remove_unused_columns:
            columns = {
                *inspect.signature(self.pipe.adapter.reference.forward).parameters,
                "label",
                "label_ids",
                "labels",
            }
        names = ("num_workers", "prefetch_factor", "multiprocessing_context", "in_order")
        options = {name: getattr(self.args, f"dataloader_{name}") for name in names}
        return MiniBatches(
            dataset,
            self.data_collator,
            batch_size,
            order,
            seed=self._data_seed,
            columns=columns,
            length_column=self.args.length_column_name,
            workers=options if options["num_workers"] else None,
        )

    def _agree(self) -> None:
        """Let what callbacks or a signal have asked of any process hold in all of them: one alone would hang."""
        asked = [int(getattr(self.control, flag)) for flag in _FLAGS]
        asked.append(self._stop_request.signal if self._stop_request is not None else 0)
        if self.topology.num_processes > 1:
            agreed = torch.tensor(asked)
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
            asked = agreed.tolist()
        *flags, self._stop_signal = asked
        for flag, value in zip(_FLAGS, flags, strict=True):
            setattr(self.control, flag, bool(value))

    @property
    def _data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    @property
    def _output_dir(self) -> Path:
        return Path(self.args.output_dir)

    @property
    def _last_process(self) -> int:
        return self.topology.process_of(self.pipe.num_stages - 1)

    def _shared(self, value: Any, source: int = 0) -> Any:
        """The value that process `source` has, in every process."""
        if self.topology.num_processes == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source)
        return box[0]


def _pipeline(model: Pipeline | ModelSource | None, args: PipelineTrainingArguments, dataset: Any) -> Pipeline:
    """The pipeline that the arguments ask for, or the one given, if it is not another one."""
    if isinstance(model, Pipeline):
        _check_given(model, args)
        return model
    assert model is not None
    config = args.config
    return Pipeline(
        model,
        config=config,
        plan_inputs=PlanInputs(
            None if config.is_decided else _example(dataset, args),
            str(getattr(args.optim, "value", args.optim)),
            args.fp32_master_weights,
            args.gradient_accumulation_steps,
        ),
        seed=args.seed,
        label_smoothing=args.label_smoothing_factor,
        logit_clipping=args.logit_clipping,
        autocast=args.autocast,
        length_bucketing=args.train_sampling_strategy == "group_by_length",
    )


def _example(dataset: Any, args: PipelineTrainingArguments) -> Workload | None:
    """What the planner reckons with."""
    by_length = args.train_sampling_strategy == "group_by_length"
    return longest_mini_batch(dataset, args.per_device_train_batch_size, args.batch_tokens, by_length=by_length)


def _check_given(pipe: Pipeline, args: PipelineTrainingArguments) -> None:
    """Raise UserError where the arguments ask for something else than the given pipeline is."""
    own = None if pipe.adapter.autocast is None else pipe.adapter.autocast.dtype
    if args.autocast not in (None, own):
        raise UserError(
            f"bf16={args.bf16}, fp16={args.fp16}, but the given Pipeline has autocast={own}; set it when the Pipeline "
            "is made"
        )
    config, loss = args.config, next(iter(pipe.stages.values())).loss
    # What has its default is not asked for; the device is a guess.
    compared = {one.name: (getattr(pipe.config, one.name), one.default) for one in fields(config)}
    del compared["device"]
    asked = {name: getattr(config, name) for name in compared}
    for name, found in (("label_smoothing_factor", loss.label_smoothing), ("logit_clipping", loss.logit_clipping)):
        asked[name], compared[name] = getattr(args, name), (found, args.__dataclass_fields__[name].default)
    for name, known in compared.items():
        if asked[name] not in known:
            raise UserError(
                f"{name}={asked[name]!r}, but the given Pipeline has {known[0]!r}; set it when the Pipeline is made"
            )


def _loss_scaler(pipe: Pipeline) -> LossScaler | None:
    """float16 needs one, for its smallest number is 6e-8. Raises UserError where the weights are not in float32."""
    if pipe.adapter.autocast is None or pipe.adapter.autocast.dtype != torch.float16:
        return None
    if pipe.adapter.dtype not in (torch.float32, torch.float64):
        raise UserError(
            f"fp16: the weights are {pipe.adapter.dtype}, and a scaled loss needs float32 weights and gradients; load "
            "the model in float32, or use bf16"
        )
    return LossScaler()


def _default_collator(processing_class: Any) -> Callable[[list[Any]], Batch]:
    """Trainer's: pad with the tokenizer where there is one."""
    if isinstance(processing_class, PreTrainedTokenizerBase):
        collator: Callable[[list[Any]], Batch] = DataCollatorWithPadding(processing_class)
        return collator
    return default_data_collator
