"""`use_liger_kernel`: kernels of liger-kernel in the layers of stages, and the comparison that says whether they fit.

The package needs a GPU. Most tests replace it by functions that change a model in the same way, and compute what
transformers does; the last one runs its kernels by triton's interpreter, where both are installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from hf_gpipe import Pipeline, PipelineTrainer
from hf_gpipe.adapters.modules.kernels import kernels_of, put_kernels
from hf_gpipe.errors import UnsupportedModelError, UserError
from hf_gpipe.model import clone
from tests.oracle import padded_batch, plain_model, run_pipeline, run_plain, tiny_config
from tests.training.toy import arguments

MICRO_BATCHES = 4
PLAIN_ROPE = modeling_llama.apply_rotary_pos_emb


class StandIn:
    """Changes a Llama as liger-kernel does. `calls` has the kernel of each call; a wrong `offset` breaks the norms."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.offset = 0.0

    def apply(self, rope: bool = True, layer_norm: bool = True, model: PreTrainedModel | None = None) -> None:
        calls, offset = self.calls, self.offset

        def norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
            calls.append("norm")
            wide = hidden.float()
            scale = wide.pow(2).mean(-1, keepdim=True).add(self.variance_epsilon).rsqrt()
            return (self.offset + self.weight) * (wide * scale).to(hidden.dtype)

        def swiglu(self: Any, x: torch.Tensor) -> torch.Tensor:
            calls.append("swiglu")
            return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

        def rotary(*args: Any) -> Any:
            calls.append("rope")
            return PLAIN_ROPE(*args)

        assert rope
        assert not layer_norm
        assert model is not None
        modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaMLP = rotary, StandIn  # type: ignore[assignment]
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.offset, module.forward = offset, MethodType(norm, module)
            if type(module).__name__ == "LlamaMLP":
                module.forward = MethodType(swiglu, module)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch"):
        module: Any = ModuleType(name)
        module.__spec__, module.MODEL_TYPE_TO_APPLY_LIGER_FN = ModuleSpec(name, None), {"llama": stand_in.apply}
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "hf_gpipe.libraries.liger", raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(clone, "_compared", {})
    return stand_in


def make(dtype: torch.dtype = torch.float64, **options: Any) -> Pipeline:
    given = {"schedule": "1f1b", "recompute": "none", "use_liger_kernel": True} | options
    return Pipeline(plain_model(tiny_config("llama"), dtype=dtype), 2, MICRO_BATCHES, device="cpu", **given)


@pytest.mark.parametrize("options", [{}, {"recompute": "block"}, {"schedule": "zb_h1"}], ids=str)
def test_every_stage_runs_the_kernels_and_no_other_model_does(options: dict[str, Any], kernels: StandIn) -> None:
    """They were refused. liger-kernel also changes names that models without kernels share, such as those of checks."""
    model = plain_model(tiny_config("llama"))
    expected = run_plain(model, padded_batch(model.config), MICRO_BATCHES)
    pipe = make(**options)
    assert modeling_llama.apply_rotary_pos_emb is PLAIN_ROPE
    assert modeling_llama.LlamaMLP is not StandIn
    kernels.calls.clear()
    found = run_pipeline(pipe, padded_batch(model.config))
    worst = max(float((found.gradients[name] - one).norm()) for name, one in expected.gradients.items())
    assert worst <= 1e-10 * expected.norm
    assert abs(found.loss - expected.loss) <= 1e-10
    runs = MICRO_BATCHES * (2 if "recompute" in options else 1)
    counts = {name: kernels.calls.count(name) for name in ("norm", "rope", "swiglu")}
    assert counts == {"norm": 6 * runs + MICRO_BATCHES, "rope": 3 * runs, "swiglu": 3 * runs}
    kernels.calls.clear()
    run_pipeline(make(**options, use_liger_kernel=False), padded_batch(model.config))
    assert not kernels.calls


def test_a_kernel_that_computes_something_else_is_an_error(kernels: StandIn) -> None:
    kernels.offset = 1e-3
    with pytest.raises(UnsupportedModelError, match=r"^llama: with use_liger_kernel a tiny clone has other gradients"):
        make()


def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "liger_kernel")
    monkeypatch.setattr("hf_gpipe.adapters.modules.kernels.find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (missing, {}, "the package liger-kernel is not installed: pip install liger-kernel, or leave"),
        (lambda patch: patch.delenv("TRITON_INTERPRET"), {}, "stages run on the CPU, .*or use device: cuda"),
        (lambda patch: None, {"torch_compile": True}, "torch_compile is true, which do not go together"),
        (lambda patch: None, {"tensor_parallel": 2}, "tensor_parallel is 2, which do not go together"),
    ],
)
def test_what_kernels_need_is_said(
    change: Callable[[pytest.MonkeyPatch], None],
    options: dict[str, Any],
    message: str,
    kernels: StandIn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(monkeypatch)
    with pytest.raises(UserError, match=f"^use_liger_kernel is true and .*{message}"):
        make(**options)


def test_models_without_kernels_are_errors(kernels: StandIn) -> None:
    marian = plain_model(tiny_config("marian"))
    with pytest.raises(UserError, match="liger-kernel has no kernels for 'marian', only for llama; leave"):
        Pipeline(marian, 2, 2, device="cpu", use_liger_kernel=True)
    with pytest.raises(UserError, match="use_liger_kernel: Sequential is no Hugging Face model"):
        Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2, 2, device="cpu", use_liger_kernel=True)


def test_trainer_s_argument_asks_for_them(kernels: StandIn, tmp_path: Path) -> None:
    """It was an error, as was the kernel of the loss, which the head has no need of."""
    config = {"fused_linear_cross_entropy": True}
    args = arguments(tmp_path, use_liger_kernel=True, liger_kernel_config=config, max_steps=1)
    PipelineTrainer(tiny_config("llama"), args)
    assert kernels.calls
    with pytest.raises(UserError, match=r"liger_kernel_config=.*takes every kernel that fits"):
        arguments(tmp_path, use_liger_kernel=True, liger_kernel_config={"rope": False})


@pytest.mark.skipif(not (find_spec("liger_kernel") and find_spec("triton")), reason="needs liger-kernel and triton")
def test_the_package_s_kernels() -> None:
    """In a process of its own: triton must not have been imported without its interpreter."""
    code = "from tests.test_kernels import compare_package; compare_package()"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})


def compare_package() -> None:
    """Compare a Llama in stages with the plain model under the same kernels of liger-kernel, to 1e-6."""
    from tests.emulated_cuda import triton  # noqa: F401  # before liger-kernel

    for autocast in (None, torch.float16):
        model = plain_model(tiny_config("llama"), dtype=torch.float32)
        pipe = make(torch.float32, autocast=autocast)
        put_kernels(kernels_of(pipe.adapter.reference), {"model": model.model})
        expected = run_plain(model, padded_batch(model.config), MICRO_BATCHES, autocast)
        found = run_pipeline(pipe, padded_batch(model.config))
        worst = max(float((found.gradients[name] - one).norm()) for name, one in expected.gradients.items())
        assert worst <= 1e-6 * expected.norm, (autocast, worst)
