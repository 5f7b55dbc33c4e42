"""One process on one and on three emulated devices computes what it computes on the CPU, with ties and dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode

from hf_gpipe import Pipeline
from tests.emulated_cuda.comparing import assert_near, compare
from tests.emulated_cuda.models import config_of
from tests.emulated_cuda.processes import on_emulated_cuda, run_emulated
from tests.oracle import padded_batch, plain_model, run_plain

THREE = ("cuda:0", "cuda:1", "cuda:2")
#: Ways to run three stages of each family.
WAYS: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": (
        {"schedule": "gpipe", "recompute": "stage", "partition": (1, 2, 3)},
        {"schedule": "1f1b", "recompute": [1, "none", "stage"]},
        {"schedule": "naive", "recompute": "block"},
    ),
    "marian": (
        {"schedule": "gpipe_fused", "recompute": "none", "partition": (1, 2, 4)},
        {"schedule": "interleaved_1f1b", "recompute": "stage"},
    ),
    "t5": (
        {"schedule": "1f1b", "recompute": "block", "partition": (5, 2, 2)},
        {"schedule": "gpipe_fused", "recompute": "stage", "partition": (1, 2, 6)},
    ),
}


def pipelines(family: str) -> list[dict[str, Any]]:
    return [{"num_stages": 3, "num_micro_batches": 2} | way for way in WAYS[family]]


@pytest.mark.parametrize("family", list(WAYS))
def test_on_three_devices(family: str) -> None:
    compare(1, family, THREE, pipelines(family), dropout=0.3)


def test_on_one_device() -> None:
    compare(1, "marian", ("cuda:1",), pipelines("marian"), dropout=0.3)


def test_untied_weights_and_rows_by_length_and_in_chunks_on_two_devices() -> None:
    way = {"num_stages": 2, "num_micro_batches": 2, "length_bucketing": True}
    chunks = {"schedule": "zb_h1", "recompute": "stage", "sequence_chunks": 3}
    compare(1, "llama", ("cuda:1", "cuda:0"), [way, way | chunks], tied=False)


class RandomOnDevice(TorchDispatchMode):
    """Notes random operations on tensors of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and args and getattr(args[0], "is_cuda", False):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@on_emulated_cuda()
def test_initial_weights_are_those_of_a_cpu() -> None:
    """A real GPU gives other values for the same seed, so they are drawn on the CPU, and in float32 for all types."""
    lora = LoraConfig(r=4, target_modules="all-linear")
    for config, peft in ((config_of("marian"), None), (config_of("t5"), None), (config_of("llama"), lora)):
        expected = dict(Pipeline(config, 2, peft_config=peft, seed=3, device="cpu").named_parameters())
        for dtype in (torch.float32, torch.bfloat16):
            with RandomOnDevice() as drawn:
                found = Pipeline(config, 2, peft_config=peft, seed=3, device="cuda:1", dtype=dtype)
            assert not drawn.found
            assert expected.keys() == dict(found.named_parameters()).keys()
            assert all(torch.equal(p.cpu(), expected[name].to(p.dtype)) for name, p in found.named_parameters())


#: Asynchronous schedules, and where their stages are: arguments of a pipeline.
WINDOWS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (THREE, {"schedule": "pipedream", "num_micro_batches": 1, "recompute": [2, "none", "none"]}),
    ("cuda:1", {"schedule": "pipedream_2bw", "num_micro_batches": 2, "recompute": "block"}),
)


def windows(device: Any, **of_pipeline: Any) -> dict[str, torch.Tensor]:
    """Two windows with clipping and AdamW: losses, norms and weights, on the CPU."""
    config = config_of("llama", tied=False, dropout=0.3)
    pipe = Pipeline(plain_model(config), 3, device=device, **of_pipeline)
    optimizers = {stage: torch.optim.AdamW(model.parameters.values(), lr=1e-2) for stage, model in pipe.models.items()}

    def update(stage: int, step: int, norm: torch.Tensor) -> None:
        pipe.clip_stage_grad_norm_(stage, 0.1, norm)
        optimizers[stage].step()

    numbers = [pipe.train_window([[padded_batch(config, seed=seed)] for seed in range(n)], update) for n in (5, 2)]
    assert pipe.stash_bytes > 0, "an old version was kept"
    return {"numbers": torch.cat(numbers), **{name: p.detach().cpu() for name, p in pipe.named_parameters()}}


def check_windows(expected: list[dict[str, torch.Tensor]]) -> None:
    for (device, way), wanted in zip(WINDOWS, expected, strict=True):
        assert_near(windows(device, **way), wanted, 1e-15, str(way))


def test_windows_of_asynchronous_schedules() -> None:
    run_emulated(check_windows, 1, [windows("cpu", **way) for _, way in WINDOWS])


@on_emulated_cuda()
def test_gradient_hooks_of_a_model_in_memory() -> None:
    """They were lost where a weight went to another device, and the gradient was another one than the plain model's."""
    config = config_of("llama", tied=False)
    model, batch = plain_model(config), padded_batch(config)
    model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))

    def triple(weight: torch.Tensor) -> None:
        weight.grad = None if weight.grad is None else 3.0 * weight.grad

    model.lm_head.weight.register_post_accumulate_grad_hook(triple)
    expected = run_plain(model, batch, 1)
    pipe = Pipeline(model, 2, 1, device=["cuda:0", "cuda:1"])
    pipe.train_step(batch)
    for name, parameter in pipe.named_parameters():
        difference = (parameter.grad.cpu() - expected.gradients[name]).abs().max()
        assert difference <= 1e-10 * expected.norm, name
