"""What users do with a pipeline, on emulated devices: as on the CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from hf_gpipe import Pipeline, RowLoss
from hf_gpipe.errors import UserError
from hf_gpipe.settings.pipeline import PipelineConfig
from tests.emulated_cuda.comparing import assert_near, gathered
from tests.emulated_cuda.models import config_of
from tests.emulated_cuda.processes import on_emulated_cuda, run_emulated
from tests.oracle import padded_batch, plain_model, run_pipeline, run_plain
from tests.test_custom_loss import margins
from tests.test_peft import adapted_model, lora
from tests.training.test_mixed_precision import Overflow
from tests.training.toy import Recorder, Rows, trainer

THREE = ["cuda:0", "cuda:1", "cuda:2"]


def generated(device: Any, num_stages: int = 3, **options: Any) -> list[Any]:
    tokens = []
    for family in ("llama", "marian"):
        pipe = Pipeline(plain_model(config_of(family), dtype=torch.float32), num_stages, device=device, **options)
        prompt = padded_batch(pipe.adapter.config)
        if family == "llama":  # padding is on the left of a prompt
            prompt = {name: tensor.flip(1) for name, tensor in prompt.items()}
        prompt.pop("labels")
        for how in ({}, {"do_sample": True}, {"num_beams": 3}):
            torch.manual_seed(0)
            tokens.append(pipe.generate(**prompt, max_new_tokens=6, **how).tolist())
    return tokens


def test_generation() -> None:
    expected = generated("cpu")
    for num_processes, device in ((1, THREE), (2, "cuda")):
        for found in run_emulated(generated, num_processes, device):
            assert found == expected
    greedy = expected[::3]
    for found in run_emulated(generated, 2, "cuda", num_stages=1, num_micro_batches=2, replicas=2):
        assert found[::3] == greedy, "the rows over two replicas"


def trained(folder: Path, **values: Any) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Weights, losses and evaluations of a training that was interrupted after two of four steps, and resumed."""
    common: dict[str, Any] = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "max_grad_norm": 0.5,
        "num_stages": 2,
        "eval_dataset": Rows(5, seed=1),
        **values,
    }
    make = lambda recorder: trainer(  # noqa: E731
        folder, model=plain_model(config_of("marian", dropout=0.1)), callbacks=[recorder], **common
    )
    whole, resumed = Recorder(), Recorder()
    first = make(whole)
    first.train()
    second = make(resumed)
    second.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    weights = [gathered(one.pipe, dict(one.pipe.named_parameters())) for one in (first, second)]
    assert_near(weights[1], weights[0], 0.0, "after resuming")
    return weights[0], whole.losses, [logs["eval_loss"] for logs in whole.logs if "eval_loss" in logs]


def test_the_trainer(tmp_path: Path) -> None:
    """Also with two replicas of two stages, which share the optimizer's steps and its state."""
    expected = trained(tmp_path / "cpu", use_cpu=True)
    for num_processes, options in ((1, {"num_stages": 3}), (4, {"replicas": 2, "zero": 1})):
        for found in run_emulated(trained, num_processes, tmp_path / str(num_processes), use_cpu=False, **options):
            assert_near(found[0], expected[0], 1e-14, "trained")
        assert found[1] + found[2] == pytest.approx(expected[1] + expected[2], rel=1e-12)


@on_emulated_cuda()
def test_autocast_is_the_plain_model_s_on_the_same_device() -> None:
    """CUDA's autocast converts other operations than the CPU's, so the plain model runs on an emulated device too."""
    for family, dtype in (("llama", torch.bfloat16), ("marian", torch.float16)):
        plain = plain_model(config_of(family), dtype=torch.float32)
        batch = padded_batch(plain.config)
        found = run_pipeline(Pipeline(copy.deepcopy(plain), 3, 2, device=THREE, autocast=dtype), batch)
        on_device = {name: t.to("cuda:3") for name, t in batch.items()}
        expected = run_plain(plain.to("cuda:3"), on_device, 2, dtype)
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)
        in_float32 = run_plain(plain, on_device, 2)
        assert found.loss != in_float32.loss, "half precision shows"
        gradients = [{name: t.cpu() for name, t in one.gradients.items()} for one in (found, expected)]
        assert_near(*gradients, 1e-6, f"{family} {dtype}")


@on_emulated_cuda(2)
def test_loss_scaling_in_two_processes(tmp_path: Path) -> None:
    spy, recorder = Overflow(2), Recorder()
    made = trainer(tmp_path, family="llama", fp16=True, max_steps=5, callbacks=[spy, recorder], use_cpu=False)
    assert made.world.device.type == "cuda"
    spy.made = made
    made.train()
    assert spy.changed is False
    assert spy.scales == [2.0**16, 2.0**16, 2.0**59, 2.0**16, 2.0**16]
    assert all(0 < loss < 10 for loss in recorder.losses)


@on_emulated_cuda()
def test_lora() -> None:
    batch = padded_batch(config_of("llama"))
    gradients = []
    for device in ("cpu", THREE):
        pipe = Pipeline(adapted_model(), 3, 2, device=device)
        pipe.train_step(batch)
        gradients.append(gathered(pipe, {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}))
    assert all("lora_" in name for name in gradients[0])
    assert_near(gradients[1], gradients[0], 1e-15)
    new = [Pipeline(config_of("llama"), 3, peft_config=lora(), device=device) for device in ("cpu", THREE)]
    assert_near(*(gathered(pipe, dict(pipe.named_parameters())) for pipe in new), 0.0, "new LoRA weights")


@on_emulated_cuda()
def test_devices_of_a_configuration() -> None:
    config = config_of("llama")
    values: dict[str, Any] = {"num_stages": 3, "num_micro_batches": 2}
    expected = float(Pipeline(plain_model(config), device="cpu", **values).train_step(padded_batch(config)))
    pipe = Pipeline(plain_model(config), config=PipelineConfig(**values, devices=("cuda:2", "cuda:0", "cuda:1")))
    assert [str(stage.device) for stage in pipe.stages.values()] == ["cuda:2", "cuda:0", "cuda:1"]
    assert float(pipe.train_step(padded_batch(config))) == expected
    pipe = Pipeline(plain_model(config), config=PipelineConfig(**values))
    assert {str(stage.device) for stage in pipe.stages.values()} == {"cuda:0"}, "auto is a GPU where there is one"
    assert str(pipe.model.device) == "cuda:0"
    with pytest.raises(UserError, match=r"cannot change its device or type: .* on cuda:0"):
        pipe.model.to("cuda:1")
    batch = {name: tensor.to("cuda:0") for name, tensor in padded_batch(config).items()}
    assert pipe.model(**batch).logits.device == torch.device("cuda:0"), "the model has its own forward on one device"


def save_and_load(folder: Path, device: Any) -> None:
    plain = plain_model(config_of("marian"), dtype=torch.float32)
    pipe = Pipeline(plain, 3, 2, device=device)
    pipe.save_pretrained(folder)
    pipe.world.barrier()
    expected = plain.state_dict()
    for name, tensor in AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    again = Pipeline(str(folder), 3, 2, device=device)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    pipe.load_pretrained(folder)
    for one in (pipe, again):
        assert all(parameter.is_cuda for parameter in one.parameters())
        for name, tensor in gathered(one, dict(one.named_parameters())).items():
            assert torch.equal(tensor, expected[name]), name


@on_emulated_cuda()
def test_saving_and_loading(tmp_path: Path) -> None:
    save_and_load(tmp_path / "model", THREE)


@on_emulated_cuda(2)
def test_saving_and_loading_in_two_processes(tmp_path: Path) -> None:
    save_and_load(tmp_path / "model", "cuda")


def stepped(pipe: Pipeline, batch: Any) -> dict[str, torch.Tensor]:
    """The loss and the gradients of a step."""
    loss = pipe.train_step(batch)
    named = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    return gathered(pipe, named) | {"loss": loss.cpu()}


@on_emulated_cuda()
def test_kinds_of_steps() -> None:
    """Losses of rows, packed rows, and weight gradients apart under autocast."""
    config = config_of("llama")
    config._attn_implementation = "sdpa"  # of packed rows it runs document by document
    batch = padded_batch(config)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"loss": RowLoss(margins, 2)}, {}),
        ({"packing": True}, {}),
        ({"schedule": "zb_h1", "autocast": torch.bfloat16}, {"schedule": "1f1b", "autocast": torch.bfloat16}),
    ]
    for values, other in cases:
        # CUDA's autocast converts other operations than the CPU's, so both are on a device.
        device: Any = THREE if other else "cpu"
        like = Pipeline(plain_model(config), 3, 2, device=device, **(other or values))
        pipe = Pipeline(plain_model(config), 3, 2, device=THREE, **values)
        assert_near(stepped(pipe, batch), stepped(like, batch), 1e-15, str(values))
        if "loss" in values:
            torch.testing.assert_close(pipe.log_probs(batch).cpu(), like.log_probs(batch))


@on_emulated_cuda(2)
def test_links_are_measured_and_memory_compared() -> None:
    config = config_of("llama")
    values: dict[str, Any] = {"num_stages": 2, "num_micro_batches": 2, "measure_links": True}
    pipe = Pipeline(plain_model(config), example=padded_batch(config), config=PipelineConfig(**values))
    assert [str(stage.device) for stage in pipe.stages.values()] == [f"cuda:{pipe.world.rank}"]
    (line,) = pipe.links
    assert line.startswith("inside "), line
