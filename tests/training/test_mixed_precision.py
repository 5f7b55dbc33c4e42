"""Training in half precision: the scale of the loss, float32 copies of weights, and losses that are no numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_gpipe import Pipeline, PipelineTrainer
from hf_gpipe.data import PairCollator
from hf_gpipe.errors import NonFiniteError, UserError
from hf_gpipe.planner.machines.devices import DEVICES
from hf_gpipe.training import base
from hf_gpipe.training.loss_scaling import SMALLEST, LossScaler
from hf_gpipe.training.master_weights import MasterWeights
from tests.gloo import run_gloo
from tests.oracle import padded_batch, plain_model, tiny_config
from tests.training.toy import CausalRows, Recorder, arguments, trainer, weights


def in_bfloat16(family: str = "llama") -> Any:
    return plain_model(tiny_config(family, tied=False), dtype=torch.bfloat16)


# ---------------------------------------------------------------------- autocast


def test_the_plain_trainer_s_losses_in_bf16(tmp_path: Path) -> None:
    plain = plain_model(tiny_config("llama", tied=False), dtype=torch.float32)
    copy = plain_model(plain.config, dtype=torch.float32)
    copy.load_state_dict(plain.state_dict())
    rows = CausalRows(22)
    common: dict[str, Any] = {
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "bf16": True,
        "save_strategy": "no",
    }
    expected, found = Recorder(), Recorder()
    Trainer(
        plain,
        TrainingArguments(output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True, report_to="none", **common),
        data_collator=PairCollator(pad_token_id=0),
        train_dataset=rows,
        callbacks=[expected],
    ).train()
    trainer(
        tmp_path, model=copy, train_dataset=rows, num_stages=3, num_micro_batches=1, callbacks=[found], **common
    ).train()
    assert found.losses == pytest.approx(expected.losses, abs=1e-4)


class Conversions(TorchDispatchMode):
    """Counts how often each of some tensors is converted to bfloat16."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self.counts = {tensor.data_ptr(): 0 for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "_to_copy" and kwargs.get("dtype") == torch.bfloat16:
            self.counts[args[0].data_ptr()] = self.counts.get(args[0].data_ptr(), 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("block", 1), (["stage", "none"], 3 + 1)])
def test_a_weight_is_converted_once_for_all_forwards_with_a_graph(recompute: Any, times: int) -> None:
    """And in each forward without one, of which the first stage has three here; the next step takes the new weights."""
    config = tiny_config("llama", tied=False)
    batch = padded_batch(config)
    pipe = Pipeline(plain_model(config, dtype=torch.float32), 2, 4, recompute=recompute, autocast=torch.bfloat16)
    weights_of = {name: p for name, p in pipe.models[0].parameters.items() if name.endswith("proj.weight")}
    with Conversions(weights_of.values()) as conversions:
        pipe.train_step(batch)
    assert {conversions.counts[p.data_ptr()] for p in weights_of.values()} == {times}
    fresh = Pipeline(plain_model(config, dtype=torch.float32), 2, 4, recompute=recompute, autocast=torch.bfloat16)
    for one in (pipe, fresh):
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(1.5)
    pipe.zero_grad()
    assert float(pipe.train_step(batch)) == float(fresh.train_step(batch))
    for mine, other in zip(pipe.parameters(), fresh.parameters(), strict=True):
        assert mine.grad is not None
        assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]


def test_a_pipeline_of_one_s_own_keeps_its_precision(tmp_path: Path) -> None:
    pipe = Pipeline(tiny_config("llama"), 2, 2, autocast=torch.float16)
    made = trainer(tmp_path, family="llama", model=pipe)
    assert made.scaler is not None
    with pytest.raises(UserError, match=r"bf16=True, but the given Pipeline has autocast=torch\.float16"):
        trainer(tmp_path, family="llama", model=pipe, bf16=True)
    with pytest.raises(UserError, match="fp16: the weights are torch.bfloat16"):  # noqa: RUF043  (a plain dot is fine)
        trainer(tmp_path, family="llama", model=in_bfloat16(), fp16=True)


def test_accelerate_s_launcher_may_ask_for_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert arguments(tmp_path).autocast == torch.bfloat16
    assert arguments(tmp_path, fp16=True).autocast == torch.float16
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(UserError, match="ACCELERATE_MIXED_PRECISION=fp8"):
        arguments(tmp_path)


# ---------------------------------------------------------------------- the scale of the loss


def test_the_scale_moves_as_torch_s(tmp_path: Path) -> None:
    """Overflows in some steps; torch's scaler with the same numbers goes the same way."""
    options: dict[str, Any] = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, **options)
    ours = LossScaler(1024.0, **options)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for step in range(20):
        overflows = step in (2, 3, 11)
        weight.grad = None
        theirs.scale(weight.sum() * (math.inf if overflows else 1.0)).backward()
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflows)
        assert ours.state_dict() == theirs.state_dict(), step
    restored = LossScaler()
    restored.load_state_dict(ours.state_dict())
    assert restored.state_dict() == ours.state_dict()


class Overflow(TrainerCallback):
    """Makes the scale so large at one step that float16 cannot hold the gradients."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.made: Any = None
        self.before: dict[str, torch.Tensor] = {}
        self.scales: list[float] = []
        self.changed: bool | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            self.made.scaler.scale = 2.0**60
            self.before = {name: p.detach().clone() for name, p in self.made.pipe.named_parameters()}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.scales.append(self.made.scaler.scale)
        if state.global_step == self._step + 1:
            parameters = dict(self.made.pipe.named_parameters())
            self.changed = any(not torch.equal(parameters[name], old) for name, old in self.before.items())
            self.made.scaler.scale = 2.0**16


def _train_in_fp16(folder: str, **options: Any) -> tuple[Any, ...]:
    spy, recorder = Overflow(2), Recorder()
    made = trainer(Path(folder), family="llama", fp16=True, max_steps=5, callbacks=[spy, recorder], **options)
    spy.made = made
    made.train()
    rates = [logs["learning_rate"] for logs in recorder.logs if "learning_rate" in logs]
    return recorder.losses, spy.changed, spy.scales, rates, weights(made)


def test_every_update_of_a_step_has_the_scale_of_its_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that makes several updates, as GRPO's, under a scale that grows with each of them."""
    seen: list[tuple[float, float]] = []
    unscale = LossScaler.unscale_

    def noted(self: LossScaler, parameters: Any) -> None:
        seen.append((made.pipe.loss_scale, self.scale))
        unscale(self, parameters)

    monkeypatch.setattr(LossScaler, "unscale_", noted)
    monkeypatch.setattr(PipelineTrainer, "updates_per_step", 3)
    made = trainer(tmp_path, family="llama", fp16=True, max_steps=2, max_grad_norm=0.0)
    assert made.scaler is not None
    made.scaler.growth_interval = 1
    made.train()
    assert (len(seen), len({scale for _, scale in seen}) > 3) == (6, True)
    assert all(of_backward == of_update for of_backward, of_update in seen)


def _train_replicas_in_fp16(folder: str) -> tuple[Any, ...]:
    return _train_in_fp16(folder, num_stages=1, replicas=[2])


@pytest.mark.parametrize("train", [_train_in_fp16, _train_replicas_in_fp16])
def test_all_processes_skip_the_update_that_overflows(train: Callable[[str], tuple[Any, ...]], tmp_path: Path) -> None:
    processes = run_gloo(train, 2, str(tmp_path))
    losses, changed, scales, rates, parameters = _train_in_fp16(str(tmp_path / "alone"))
    assert changed is False
    assert scales == [2.0**16, 2.0**16, 2.0**59, 2.0**16, 2.0**16]
    assert all(math.isfinite(loss) for loss in losses), "the loss itself is not scaled"
    assert rates[2] == rates[3] > rates[4], "the learning rate's schedule waits as well"
    for found in processes:
        assert found[:4] == (pytest.approx(losses, abs=1e-6), changed, scales, rates)
        assert all(torch.allclose(found[4][name], tensor, atol=1e-6) for name, tensor in parameters.items())


@pytest.mark.parametrize("reaction", ["stop", "ignore"])
def test_gradients_that_are_no_numbers_under_any_scale(reaction: str, tmp_path: Path) -> None:
    """All steps were skipped without a word, and after a thousand of them the scale was 0 and divided the norm."""
    made = trainer(tmp_path, family="llama", fp16=True, max_steps=4, num_stages=1, on_nonfinite_loss=reaction)
    next(made.pipe.parameters()).register_hook(lambda gradient: gradient * math.nan)
    made.scaler.scale = 2 * SMALLEST  # type: ignore[union-attr]
    before = weights(made)
    if reaction == "stop":
        with pytest.raises(NonFiniteError, match=r"step 2: the loss is .* and the gradient's norm nan; lower"):
            made.train()
    else:
        made.train()
    assert made.scaler.scale == SMALLEST  # type: ignore[union-attr]
    assert all(torch.equal(before[name], weight) for name, weight in weights(made).items())


def test_the_scale_is_resumed(tmp_path: Path) -> None:
    def run(folder: Path, **values: Any) -> Any:
        made = trainer(folder, family="llama", fp16=True, max_steps=6, save_strategy="steps", save_steps=3, **values)
        made.scaler = LossScaler(16.0, growth_interval=2)
        return made

    whole = run(tmp_path / "whole")
    whole.train()
    resumed = run(tmp_path / "whole")
    resumed.train(resume_from_checkpoint=tmp_path / "whole" / "checkpoint-3")
    assert resumed.scaler.state_dict() == whole.scaler.state_dict()
    assert resumed.scaler.scale == 2.0**7
    assert all(torch.equal(weights(resumed)[name], tensor) for name, tensor in weights(whole).items())


# ---------------------------------------------------------------------- float32 copies of half-precision weights


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adafactor", "sgd"])
def test_small_updates_add_up_in_float32(optim: str, tmp_path: Path) -> None:
    """Compared with a loop that keeps float32 weights itself and computes in a bfloat16 copy of them."""
    made = trainer(
        tmp_path,
        model=in_bfloat16(),
        train_dataset=CausalRows(),
        fp32_master_weights=True,
        optim=optim,
        learning_rate=1e-4,
        max_steps=4,
        num_stages=3,
        save_strategy="steps",
        save_steps=2,
    )
    made.train()
    assert made.master_weights is not None
    copies, found = made.master_weights.copies, weights(made)
    assert {copy.dtype for copy in copies.values()} == {torch.float32}
    assert all(torch.equal(copies[name].bfloat16(), found[name]) for name in copies)
    start = dict(in_bfloat16().named_parameters())
    moved = [name for name in copies if not torch.equal(copies[name], start[name].float())]
    assert len(moved) > len(copies) / 2
    rounded = sum(int((copies[name] != found[name].float()).sum()) for name in copies)
    assert rounded > 100, "the copies know more than the weights"
    state = trainer(
        tmp_path,
        model=in_bfloat16(),
        train_dataset=CausalRows(),
        fp32_master_weights=True,
        optim=optim,
        learning_rate=1e-4,
        max_steps=4,
        num_stages=2,
    )
    state.train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    assert state.master_weights is not None
    assert all(torch.equal(state.master_weights.copies[name], copy) for name, copy in copies.items())


def test_one_update_is_the_optimizer_s_on_float32_weights(tmp_path: Path) -> None:
    made = trainer(
        tmp_path, model=in_bfloat16(), train_dataset=CausalRows(), fp32_master_weights=True, max_steps=1, optim="sgd"
    )
    before = {name: copy.detach().clone() for name, copy in made.master_weights.copies.items()}  # type: ignore[union-attr]
    gradients: dict[str, torch.Tensor] = {}

    class Spy(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gradients.update({name: p.grad.float() for name, p in made.pipe.named_parameters()})

    made.add_callback(Spy())
    made.args.set_optimizer("sgd", learning_rate=1e-2, weight_decay=0.0)
    made.train()
    for name, copy in made.master_weights.copies.items():  # type: ignore[union-attr]
        torch.testing.assert_close(copy.detach(), before[name] - 1e-2 * gradients[name], rtol=0, atol=1e-6)


def _loop_in_fp16(model: Any, rows: Any, steps: int, max_norm: float, rate: float = 0.1) -> tuple[Any, list[float]]:
    """SGD on float32 copies of what is trained, with a scaled loss under autocast: the copies and the losses."""
    scale, losses = 2.0**16, []
    copies = {p: p.detach().float() for p in model.parameters() if p.requires_grad}
    for step in range(steps):
        batch = PairCollator(pad_token_id=0)([rows[index] for index in range(4 * step, 4 * step + 4)])
        with torch.autocast("cpu", torch.float16):
            logits = model(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"][:, 1:].flatten())
        (scale * loss).backward()
        gradients = {p: p.grad.float() / scale for p in copies}
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        for parameter, gradient in gradients.items():
            copies[parameter] -= rate * gradient * min(1.0, max_norm / float(norm) if max_norm else 1.0)
            parameter.data.copy_(copies[parameter])
            parameter.grad = None
        losses.append(loss.item())
    return {name: copies[p] for name, p in model.named_parameters() if p in copies}, losses


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("has_adapters", [False, True])
def test_float16_weights_train_as_in_a_plain_loop(has_adapters: bool, max_norm: float, tmp_path: Path) -> None:
    """With float32 copies of all weights, or with float32 adapters of weights that stay."""
    mine, other = (plain_model(tiny_config("llama", tied=False), dtype=torch.float16) for _ in range(2))
    if has_adapters:
        lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        mine, other = get_peft_model(mine, lora), get_peft_model(other, lora)
        other.load_state_dict(mine.state_dict())
    recorder, rows = Recorder(), CausalRows()
    made = trainer(
        tmp_path,
        model=mine,
        train_dataset=rows,
        callbacks=[recorder],
        fp16=True,
        fp32_master_weights=not has_adapters,
        optim="sgd",
        weight_decay=0.0,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        max_grad_norm=max_norm,
        max_steps=5,
        num_stages=3,
    )
    made.train()
    start = {name: p.detach().clone().float() for name, p in other.named_parameters()}
    expected, losses = _loop_in_fp16(other, rows, 5, max_norm)
    assert recorder.losses == pytest.approx(losses, abs=1e-3)
    found = dict(made.pipe.named_parameters()) if has_adapters else made.master_weights.copies  # type: ignore[union-attr]
    found = {name.removeprefix("base_model.model."): weight.detach() for name, weight in found.items()}
    for name, copy in expected.items():
        change, whole = found[name.removeprefix("base_model.model.")] - start[name], copy - start[name]
        assert (change - whole).norm() < 0.01 * whole.norm(), name


def test_weights_beside_adapters_are_not_trained_in_float16(tmp_path: Path) -> None:
    """A head that was trained with adapters had updates in float16, of which torch's scaler refuses to unscale any."""
    model = plain_model(tiny_config("llama", tied=False), dtype=torch.float16)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with pytest.raises(UserError, match=r"fp16: \S*lm_head\S+, which is trained, is torch\.float16, and a scaled loss"):
        trainer(tmp_path, model=model, train_dataset=CausalRows(), fp16=True)


def test_a_gradient_too_small_for_float16_reaches_its_copy() -> None:
    """Divided by the scale in float16, a gradient below 3e-8 would be 0."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    masters = MasterWeights({"weight": weight})
    optimizer = torch.optim.SGD(masters.copies.values(), lr=1.0)
    masters.serve(optimizer)
    weight.grad, masters.loss_scale = torch.full_like(weight, 2.0**-10), 2.0**12
    optimizer.step()
    assert torch.equal(masters.copies["weight"].detach(), torch.full((3,), 1 - 2.0**-22))


def _with_copies(folder: Path, steps: int, *, copies: bool = True, **options: Any) -> PipelineTrainer:
    common: dict[str, Any] = {"train_dataset": CausalRows(), "num_stages": 1, "learning_rate": 1e-2}
    common |= {"model": in_bfloat16(), "max_steps": steps, "fp32_master_weights": copies}
    return trainer(folder, **common | options)


def test_copies_follow_weights_that_a_script_changes(tmp_path: Path) -> None:
    """The first update put the weights back that the model had when the trainer was made, and trained those."""
    model, recorders = in_bfloat16(), (Recorder(), Recorder())
    late = _with_copies(tmp_path, 3, callbacks=[recorders[0]])
    with torch.no_grad():
        for parameters in (model.parameters(), late.pipe.parameters()):
            for parameter in parameters:
                parameter.mul_(0.75)
    early = _with_copies(tmp_path, 3, model=model, callbacks=[recorders[1]])
    early.train()
    late.train()
    assert recorders[0].losses == recorders[1].losses
    assert all(torch.equal(weights(late)[name], weight) for name, weight in weights(early).items())


def test_copies_of_weights_that_another_run_has_trained_are_dropped(tmp_path: Path) -> None:
    """A run without copies kept those of its checkpoint, and saved them; the next run put them in place of weights."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    _with_copies(tmp_path, 2, **saving).train()
    between = _with_copies(tmp_path, 4, copies=False, **saving)
    between.train(resume_from_checkpoint=True)
    assert {slot for slots in between.made_optimizer().state.values() for slot in slots} == {
        *("step", "exp_avg", "exp_avg_sq")
    }
    last = _with_copies(tmp_path, 4)
    last.train(resume_from_checkpoint=True)
    assert last.master_weights is not None
    assert all(torch.equal(last.master_weights.copies[name], w.float()) for name, w in weights(between).items())


def test_sums_in_float16_are_for_cards_that_gain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = torch.backends.cuda.matmul
    with pytest.raises(UserError, match="fp16_accumulation is true and fp16 is false"):
        trainer(tmp_path, family="llama", fp16_accumulation=True)
    with pytest.raises(UserError, match=r"fp16_accumulation is true, and cpu is not known.*rtx4090"):
        trainer(tmp_path, family="llama", fp16=True, fp16_accumulation=True)
    assert not matmul.allow_fp16_accumulation
    monkeypatch.setattr(base, "rated_machine", lambda device: DEVICES["rtx4090"])
    try:
        trainer(tmp_path, family="llama", fp16=True, fp16_accumulation=True)
        assert matmul.allow_fp16_accumulation
    finally:
        matmul.allow_fp16_accumulation = False


def test_float32_weights_need_no_copies(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"fp32_master_weights: .* is torch\.float32"):
        trainer(tmp_path, fp32_master_weights=True)


# ---------------------------------------------------------------------- losses that are no numbers


class Poison(TrainerCallback):
    """Makes the weights no numbers before one step, and puts them back after it."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.made: Any = None
        self.saved: torch.Tensor | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            weight = next(self.made.pipe.parameters())
            self.saved = weight.detach().clone()
            with torch.no_grad():
                weight.fill_(math.nan)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.saved is not None:
            with torch.no_grad():
                next(self.made.pipe.parameters()).copy_(self.saved)
            self.saved = None


def _train_poisoned(folder: str, on_nonfinite_loss: str, **options: Any) -> tuple[str, bool]:
    """The weight that becomes nan is in process 0 alone."""
    spy = Poison(1)
    options |= {"on_nonfinite_loss": on_nonfinite_loss, "max_steps": 3}
    made = trainer(Path(folder), family="llama", callbacks=[spy], **options)
    spy.made = made
    try:
        made.train()
        outcome = "trained"
    except NonFiniteError as error:
        outcome = str(error)
    return outcome, all(bool(p.isfinite().all()) for p in made.pipe.parameters())


def _train_poisoned_both_ways(folder: str) -> list[tuple[str, bool]]:
    return [_train_poisoned(folder, "skip"), _train_poisoned(folder, "stop")]


def _train_poisoned_replicas(folder: str) -> list[tuple[str, bool]]:
    return [_train_poisoned(folder, how, num_stages=1, replicas=[2]) for how in ("skip", "stop")]


@pytest.mark.parametrize("train", [_train_poisoned_both_ways, _train_poisoned_replicas])
def test_a_loss_that_is_no_number_is_skipped_or_ends_the_training_in_all_processes(
    train: Callable[[str], list[tuple[str, bool]]], tmp_path: Path
) -> None:
    for skipped, stopped in run_gloo(train, 2, str(tmp_path)):
        assert skipped == ("trained", True)
        assert stopped[0].startswith("step 2: the loss is nan")
    assert _train_poisoned(str(tmp_path), "ignore") == ("trained", False)
