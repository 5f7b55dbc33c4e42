"""Cases that the planner predicts and this machine runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig

from bench.models import quantisation
from bench.processes import meet
from hf_gpipe import Pipeline
from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.observation.tiny import tiny_config
from hf_gpipe.job.world import World
from hf_gpipe.losses.loss import PLAIN, Loss
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.modes.divided_head.table import DIVIDED_HEAD
from hf_gpipe.partition import partition
from hf_gpipe.pipeline.probe import PROBE
from hf_gpipe.planner.costs.measure import profile_layers
from hf_gpipe.planner.costs.model_costs import ModelCosts, mean_costs
from hf_gpipe.planner.machines.devices import Device
from hf_gpipe.planner.of_model import costs_of_members, planner_of
from hf_gpipe.planner.plan import Plan
from hf_gpipe.planner.workload import PlanInputs, Workload
from hf_gpipe.runtime.mesh import ranks_of_workers
from hf_gpipe.schedule import LONGEST_WINDOW, has_windows
from hf_gpipe.schedule.groups import Groups
from hf_gpipe.settings.division import Division
from hf_gpipe.settings.pipeline import DecidedConfig
from hf_gpipe.tasks.dpo import PreferenceLoss

CPU = torch.device("cpu")
#: Of a pipeline.
_OPTIONS = (
    *("num_stages", "num_micro_batches", "schedule", "recompute", "replicas", "zero", "placement", "sequence_chunks"),
)


@dataclass(frozen=True)
class Case:
    """One model and one way to train it; `num_processes` share the stages.

    Attributes:
        training: all weights; LoRA adapters, on a base of 4 bits, or with the loss of DPO; all weights on packed rows,
            or under autocast in bfloat16.
        others: other settings of the pipeline.
        folder: of a checkpoint of the model; None: its weights are random.
        dtype: of the weights.
        device: of each process.
    """

    name: str
    config: PreTrainedConfig
    rows: int
    source: int
    target: int
    num_stages: int
    num_processes: int
    num_micro_batches: int
    schedule: str
    recompute: str
    replicas: int | tuple[int, ...] = 1
    zero: Literal[0, 1] = 0
    placement: str | None = None
    sequence_chunks: int = 1
    training: Literal["full", "lora", "qlora", "dpo", "packed", "bf16"] = "full"
    others: Mapping[str, Any] = field(default_factory=dict)
    folder: str | None = None
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def num_ranks(self) -> int:
        """Processes that share each layer."""
        return self.others.get("tensor_parallel", 1)

    @property
    def weights_visit(self) -> bool:
        """Whether weights come from the host, which on a CPU is the same memory."""
        return "offload_weights" in self.others

    @property
    def reads_files(self) -> bool:
        """Whether it needs a checkpoint: weights of 4 bits and weights that visit are read from one."""
        return self.training == "qlora" or self.others.get("offload_weights") == "frozen"

    @property
    def is_asynchronous(self) -> bool:
        """Whether steps run in windows."""
        return has_windows(self.schedule)

    @property
    def options(self) -> dict[str, Any]:
        """Of the pipeline."""
        cut = {"partition": "count", "num_processes": self.num_processes // self.num_ranks}
        return {name: getattr(self, name) for name in _OPTIONS} | cut | dict(self.others)

    @property
    def of_model(self) -> dict[str, Any]:
        """The options of the pipeline that say how the model is made."""
        of_weights = {"dtype": self.dtype}
        if self.training in ("full", "packed"):
            return of_weights
        if self.training == "bf16":
            return of_weights | {"autocast": torch.bfloat16}
        import peft

        lora = of_weights | {"peft_config": peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")}
        return lora | {"quantization_config": quantisation("nf4", self.dtype)} if self.training == "qlora" else lora

    @property
    def loss(self) -> Loss:
        """Of the micro-batch."""
        return PreferenceLoss() if self.training == "dpo" else PLAIN

    def adapter(self) -> Adapter:
        """Of the model."""
        return PROBE.open(ModelSpec.of(self.folder or self.config, **self.of_model), torch.device(self.device))

    @property
    def inputs(self) -> PlanInputs:
        """The mini-batch and the optimizer, for the planner."""
        if self.training == "packed":
            batch = self.batch()
            return PlanInputs(Workload.from_batch(batch, packing=True), packing=True)
        # A micro-batch of one row has no padding.
        return PlanInputs(Workload(self.rows, self.source, self.target, self.rows > self.num_micro_batches))

    @property
    def workload(self) -> Workload:
        """Of its largest micro-batch."""
        workload = self.inputs.mini_batch()
        return workload.with_rows(-(-self.rows // self.num_micro_batches))

    @property
    def settings(self) -> DecidedConfig:
        """As the planner is told."""
        divides_head = self.schedule in DIVIDED_HEAD
        layers = partition(len(self.adapter().layers), self.num_stages, "count", shares_last=divides_head)
        return DecidedConfig(**self.options | {"partition": tuple(map(len, layers))})

    def batch(self) -> dict[str, torch.Tensor]:
        """Random ids; the last row is a token shorter than the others, and of packed rows the second half by half."""
        generator = torch.Generator().manual_seed(0)
        vocabulary = self.config.vocab_size
        ids = torch.randint(3, vocabulary, (self.rows, self.source), generator=generator)
        labels = torch.randint(3, vocabulary, (self.rows, self.target), generator=generator)
        mask = torch.ones_like(ids)
        mask[:, -1] = torch.arange(self.rows) % self.num_micro_batches != 0
        if self.training == "packed":
            mask[self.rows // 2 :, self.source // 2 :] = 0
        if not self.config.is_encoder_decoder:
            labels = ids.masked_fill(mask == 0, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def tiny(case: Case) -> Case:
    """The same with a clone of the model that has sizes of a few dozen, and other numbers of layers."""
    others = {name: value for name, value in case.others.items() if name != "partition"}
    return replace(case, config=tiny_config(case.config), source=12, target=12, others=others)


def profile(case: Case) -> Sequence[ModelCosts]:
    """The costs of a case's layers for each chunk of its rows, measured while the other processes measure."""
    measured = partial(
        profile_layers,
        case.adapter(),
        device=torch.device(case.device),
        loss=case.loss.planned,
        barrier=meet,
        ranks=ranks_of_workers(World.current(), Division(case.num_ranks)),
        make_optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
    )
    return costs_of_members(case.workload, Groups(case.sequence_chunks), measured)


def planned(measured: Sequence[Sequence[ModelCosts]], case: Case, device: Device, **options: Any) -> Plan:
    """The plan of a case by what each process has measured, if it has; `options` are the planner's."""
    of_members = [mean_costs(same) for same in zip(*measured, strict=True)]

    def seconds(workload: Workload, costs: ModelCosts) -> ModelCosts:
        is_known = of_members and workload.rows == case.workload.rows
        return of_members[workload.member] if is_known else costs

    planner = planner_of(
        *(case.adapter(), case.inputs, device, case.settings),
        loss=case.loss.planned,
        as_on_gpu=case.device != "cpu",
        seconds=seconds,
        **options,
    )
    return planner.plan(case.settings)


def train_pipeline(
    case: Case,
    num_steps: int,
    after_step: Callable[[], None] = lambda: None,
    before_steps: Callable[[], None] = lambda: None,
) -> tuple[Pipeline, tuple[float, ...]]:
    """Some steps of a case, and the seconds of each but the first; the functions before and after are not in them.

    Of an asynchronous schedule one window follows the first, and the time of its steps is the mean.
    """
    pipe = Pipeline(
        case.folder or case.config,
        **case.options,
        **case.of_model,
        loss=case.loss if case.training == "dpo" else None,
        packing=case.training == "packed",
        device=case.device,
    )
    optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad], fused=True)
    if case.zero:
        pipe.shard_optimizer(optimizer)
    batch, seconds = case.batch(), []
    before_steps()
    if case.is_asynchronous:
        return pipe, _train_windows(pipe, case, after_step)
    for _ in range(num_steps):
        meet()
        start = time.perf_counter()
        pipe.train_step(batch)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        pipe.zero_grad()
        meet()
        seconds.append(time.perf_counter() - start)
        after_step()
    return pipe, tuple(seconds[1:])


def _train_windows(pipe: Pipeline, case: Case, after_step: Callable[[], None]) -> tuple[float, ...]:
    """Two windows as long as the planner's, of which the second counts."""
    optimizers = {
        stage: torch.optim.AdamW(list(model.parameters.values()), fused=True) for stage, model in pipe.models.items()
    }

    def update(stage: int, _: int, norm: torch.Tensor) -> None:
        torch.nn.utils.clip_grads_with_norm_(optimizers[stage].param_groups[0]["params"], 1.0, norm)
        optimizers[stage].step()

    steps = [[case.batch()]] * max(4, LONGEST_WINDOW // case.num_micro_batches)
    seconds = 0.0
    for _ in range(2):
        meet()
        start = time.perf_counter()
        pipe.train_window(steps, update)
        meet()
        seconds = time.perf_counter() - start
        after_step()
    return (seconds / len(steps),)
