"""How often the host waits for its devices: once in a training step, for the loss and the norm of the gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from hf_gpipe import Pipeline
from hf_gpipe.job.world import World
from hf_gpipe.model.clone import exact_clone, padded_batch
from hf_gpipe.runtime.gradient_norm import clip, gradient_norm, gradients_of
from scripts.families import default_config
from tests.emulated_cuda.device import Counts, counting
from tests.emulated_cuda.processes import on_emulated_cuda
from tests.oracle import plain_model, tiny_config
from tests.training.toy import CausalRows, trainer


def second_step(pipe: Pipeline, batch: dict[str, torch.Tensor]) -> Counts:
    """A whole step, with clipping and an optimizer, after another one."""
    optimizer = torch.optim.AdamW(pipe.parameters())

    def update(loss: torch.Tensor, norm: torch.Tensor) -> None:
        pipe.clip_grad_norm_(float(norm) / 2 + 0 * float(loss), norm)
        optimizer.step()

    for _ in range(2):
        pipe.zero_grad()
        with counting() as counts:
            pipe.train_step(batch, update=update)
    return counts


def is_within_the_bound(counts: Counts) -> bool:
    return len(counts.synchronisations) <= 1 and not counts.pageable_copies


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"autocast": torch.bfloat16}),
        ("gemma2", {}),
        ("marian", {}),
        ("qwen3", {"autocast": torch.bfloat16, "sequence_chunks": 3}),
        ("gemma3_text", {"packing": True, "sequence_chunks": 3}),
    ],
)
@on_emulated_cuda()
def test_a_step_on_two_devices(family: str, options: dict[str, Any]) -> None:
    model = exact_clone(default_config(family), torch.float32)
    batches = [padded_batch(model) for _ in range(3)]
    batches[1]["attention_mask"] = torch.ones_like(batches[1]["attention_mask"])
    del batches[2]["attention_mask"]
    devices = ["cuda:0", "cuda:1"]
    pipe = Pipeline(model, 3, 2, "1f1b", "stage", device=devices, **options)
    for batch in batches:
        counts = second_step(pipe, batch)
        assert is_within_the_bound(counts), counts


class Waits(TrainerCallback):
    """Counts from the beginning of the third step to that of the fourth."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self._counting = counting()
            self.counts = self._counting.__enter__()
        if state.global_step == 3:
            self._counting.__exit__(None, None, None)


@on_emulated_cuda()
def test_a_step_of_the_trainer(tmp_path: Path) -> None:
    waits = Waits()
    model = plain_model(tiny_config("llama", tied=False), dtype=torch.float32)
    options: dict[str, Any] = {"max_steps": 4, "logging_steps": 4, "save_strategy": "no", "use_cpu": False}
    trainer(tmp_path, model=model, train_dataset=CausalRows(24), callbacks=[waits], **options).train()
    assert is_within_the_bound(waits.counts), waits.counts


class Operations(TorchDispatchMode):
    """Notes the operations, and the most values that one of them has made in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64 and result.is_cuda:
            self.largest = max(self.largest, result.numel())
        return result


@on_emulated_cuda()
def test_norm_and_clipping_are_few_kernels_and_copy_no_gradient() -> None:
    parameters = [torch.nn.Parameter(torch.ones(500, device="cuda:0")) for _ in range(100)]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 1e-30 * (1 + number))
    with Operations() as operations:
        norm = gradient_norm(gradients_of(parameters), World.current())
        clip(parameters, 1e-30, 1.0)
    expected = torch.tensor([1e-30 * (1 + number) for number in range(100)], dtype=torch.float64).norm() * 500**0.5
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    assert {"_foreach_norm", "_foreach_mul_"} <= set(operations.names)
    assert len(operations.names) < len(parameters)
    assert operations.largest == len(parameters)


@on_emulated_cuda()
def test_logits_do_not_stay_on_the_device(tmp_path: Path) -> None:
    """Those of one micro-batch have left it when the next one's come."""
    alive: list[int] = []

    def preprocess(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        alive.append(torch.cuda.memory_allocated(0))
        return logits

    options: dict[str, Any] = {"num_micro_batches": 4, "per_device_eval_batch_size": 4, "use_cpu": False}
    model = plain_model(tiny_config("llama", tied=False), dtype=torch.float32)
    rows = [{"input_ids": list(range(3, 43)), "labels": list(range(3, 43))}] * 4
    made = trainer(
        tmp_path, model=model, train_dataset=rows, preprocess_logits_for_metrics=preprocess, num_stages=1, **options
    )
    made.predict(rows)
    logits_bytes = 40 * model.config.vocab_size * 4
    assert len(alive) == 4
    assert max(alive[1:]) - alive[0] < logits_bytes
