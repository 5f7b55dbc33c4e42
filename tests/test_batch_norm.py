"""BatchNorm in a pipeline: micro-batches by their own statistics, moving averages by those of whole mini-batches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from hf_gpipe import Pipeline
from hf_gpipe.errors import HfGpipeError, UnsupportedModelError, UserError
from hf_gpipe.runtime.cutting import split_rows
from tests.gloo import run_gloo
from tests.oracle import Batch, Result, assert_same

MOMENTA = (0.1, None, 0.7)


class Residual(nn.Module):
    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=momentum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.convolution(x)).relu()


def classifier(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Residual(MOMENTA[1]), nn.Flatten(), nn.Linear(36, 6))
    return nn.Sequential(*layers, nn.BatchNorm1d(6, momentum=MOMENTA[2], affine=False), nn.Linear(6, 5)).to(dtype)


def images(rows: int, seed: int, mean: float = 0.0, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    pixels = mean + torch.randn(rows, 3, 5, 5, generator=generator, dtype=torch.float64)
    return {"pixels": pixels.to(dtype), "labels": torch.randint(0, 5, (rows,), generator=generator)}


def norms_of(model: nn.Module) -> dict[str, Any]:
    return {name: part for name, part in model.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)}


def plain_steps(model: nn.Module, steps: list[list[Batch]], num_micro_batches: int) -> Result:
    """The last step's loss and gradients, of a loop over micro-batches; then the averages by their definition."""
    averages = copy.deepcopy(model).state_dict()
    inputs: dict[str, list[torch.Tensor]] = {}
    for name, norm in norms_of(model).items():
        norm.register_forward_pre_hook(lambda _, args, name=name: inputs[name].append(args[0].detach()))
    for step in steps:
        model.zero_grad()
        value, count = 0.0, sum(len(one["labels"]) for one in step)
        for batch in step:
            inputs.update((name, []) for name in norms_of(model))
            for rows in split_rows(batch, num_micro_batches):
                loss = F.cross_entropy(model(rows["pixels"]), rows["labels"], reduction="sum") / count
                loss.backward()
                value += loss.item()
            for name, norm in norms_of(model).items():
                # Together the micro-batches' values are those of the mini-batch.
                values = torch.cat(inputs[name]).transpose(0, 1).flatten(1).double()
                averages[f"{name}.num_batches_tracked"] += 1
                factor = norm.momentum or 1 / averages[f"{name}.num_batches_tracked"].item()
                for key, new in (("running_mean", values.mean(1)), ("running_var", values.var(1))):
                    old = averages[f"{name}.{key}"]
                    old.copy_((1 - factor) * old.double() + factor * new)
    model.load_state_dict({name: t for name, t in averages.items() if "running" in name or "tracked" in name}, False)
    return Result(value, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def saved(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}


def assert_averages(found: dict[str, torch.Tensor], model: nn.Module, tolerance: float = 1e-12) -> None:
    expected = dict(model.named_buffers())
    assert expected.keys() <= found.keys()
    assert len(expected) == 9
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=tolerance, atol=tolerance), name


def train(pipe: Pipeline, steps: list[list[Batch]]) -> Result:
    for step in steps:
        pipe.zero_grad()
        loss = pipe.train_step(step)
    return Result(loss.item(), {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None})


STEPS = [[images(9, 1)], [images(8, 2, 3.0), images(7, 3)], [images(9, 4)]]


@pytest.mark.parametrize("recompute", ["none", "stage", "block"])
@pytest.mark.parametrize(
    ("num_stages", "num_micro_batches", "schedule"),
    [(1, 1, "gpipe"), (2, 3, "gpipe"), (3, 3, "1f1b"), (5, 2, "1f1b"), (2, 3, "zb_h1"), (4, 2, "zb_h1")],
)
def test_averages_follow_mini_batches(
    num_stages: int, num_micro_batches: int, schedule: str, recompute: str, tmp_path: Path
) -> None:
    model = classifier()
    pipe = Pipeline(copy.deepcopy(model), num_stages, num_micro_batches, schedule, recompute=recompute)
    assert_same(train(pipe, STEPS), plain_steps(model, STEPS, num_micro_batches))
    pipe.save_pretrained(tmp_path)
    assert_averages(saved(tmp_path), model)
    batch = images(5, 9)
    expected = F.cross_entropy(model.eval()(batch["pixels"]), batch["labels"]).item()
    assert pipe.eval_step(batch).loss == pytest.approx(expected, rel=1e-10)
    assert pipe.eval_step(images(1, 9)).loss > 0, "a micro-batch of one row has no statistics, and needs none"
    other = Pipeline(classifier(), 2, 2)
    other.load_pretrained(tmp_path)
    other.save_pretrained(tmp_path / "again")
    assert all(torch.equal(tensor, saved(tmp_path / "again")[name]) for name, tensor in saved(tmp_path).items())


def _of_replicas(replicas: Any, num_stages: int, schedule: str, recompute: str) -> tuple[Result, dict[str, Any]]:
    pipe = Pipeline(classifier(), num_stages, 3, schedule, replicas=replicas, recompute=recompute)
    result = train(pipe, STEPS)
    buffers = {name: t.clone() for stage in pipe.stages.values() for name, t in stage.model.buffers.items()}
    return result, buffers


@pytest.mark.parametrize(
    ("replicas", "num_stages", "schedule", "recompute"),
    [(2, 1, "gpipe", "stage"), (2, 1, "zb_h1", "none"), ([1, 2], 2, "1f1b", "stage")],
)
def test_replicas_have_the_averages_of_one_process(
    replicas: Any, num_stages: int, schedule: str, recompute: str
) -> None:
    processes = 2 if num_stages == 1 else 3
    found = run_gloo(_of_replicas, processes, replicas, num_stages, schedule, recompute)
    _, expected = _of_replicas(1, 1, "gpipe", "none")
    plain = classifier()
    gradients = plain_steps(plain, STEPS, 3).gradients
    assert set().union(*(buffers for _, buffers in found)) == expected.keys()
    for result, buffers in found:
        assert all(torch.equal(tensor, expected[name]) for name, tensor in buffers.items())
        norm = sum(gradient.square().sum() for gradient in gradients.values()).sqrt()
        assert all((gradients[name] - one).norm() <= 1e-10 * norm for name, one in result.gradients.items())
    assert_averages(expected, plain)


def _of_synchronised(schedule: str, recompute: str, num_stages: int) -> Result:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(classifier())
    pipe = Pipeline(model, num_stages, 4, schedule, replicas=2, recompute=recompute)
    result = train(pipe, SYNCHRONISED)
    with pytest.raises(HfGpipeError, match="give every stage as many replicas"):
        pipe.train_step(images(3, 1))
    return result


#: Of each mini-batch four micro-batches of two rows, of which two at a time are normalised together.
SYNCHRONISED = [[images(8, 1)], [images(8, 2, 3.0), images(8, 3)]]


@pytest.mark.parametrize(
    ("schedule", "recompute", "num_stages"), [("1f1b", "stage", 1), ("zb_h1", "none", 1), ("gpipe", "stage", 2)]
)
def test_replicas_share_the_statistics_of_sync_batch_norm(schedule: str, recompute: str, num_stages: int) -> None:
    """As one process does with half as many micro-batches; without replicas it is a BatchNorm."""
    plain = classifier()
    expected = plain_steps(plain, SYNCHRONISED, 2)
    for result in run_gloo(_of_synchronised, 2 * num_stages, schedule, recompute, num_stages):
        assert abs(result.loss - expected.loss) <= 1e-10
        norm = expected.norm
        assert all((expected.gradients[name] - one).norm() <= 1e-10 * norm for name, one in result.gradients.items())
    alone = Pipeline(nn.SyncBatchNorm.convert_sync_batchnorm(classifier()), 2, 2)
    assert_same(train(alone, SYNCHRONISED), expected)


def test_a_large_mean_loses_no_digits(tmp_path: Path) -> None:
    steps = [[images(9, 1, 1000.0, torch.float32)]]
    model = nn.Sequential(nn.BatchNorm2d(3, momentum=1.0), nn.Flatten(), nn.Linear(75, 5))
    pipe = Pipeline(copy.deepcopy(model), 2, 3)
    train(pipe, steps)
    pipe.save_pretrained(tmp_path)
    pixels = steps[0][0]["pixels"].double().transpose(0, 1).flatten(1)
    assert torch.allclose(saved(tmp_path)["0.running_var"].double(), pixels.var(1), rtol=1e-5)
    assert torch.allclose(saved(tmp_path)["0.running_mean"].double(), pixels.mean(1), rtol=1e-7)


@pytest.mark.parametrize(
    ("dtype", "is_synchronised"), [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)]
)
def test_statistics_are_in_float32_under_autocast(dtype: torch.dtype, is_synchronised: bool) -> None:
    """Also of a SyncBatchNorm without replicas."""
    steps = [[images(9, number, 3.0 * number, torch.float32)] for number in range(2)]
    model = classifier(torch.float32)
    given = copy.deepcopy(model)
    given = nn.SyncBatchNorm.convert_sync_batchnorm(given) if is_synchronised else given
    pipe = Pipeline(given, 3, 3, "1f1b", recompute="stage", autocast=dtype, device="cpu")
    found = train(pipe, steps)
    with torch.autocast("cpu", dtype):
        expected = plain_steps(model, steps, 3)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, one in expected.gradients.items():
        assert (found.gradients[name] - one).norm() <= 1e-6 * expected.norm, name
    buffers = {name: t for stage in pipe.stages.values() for name, t in stage.model.buffers.items()}
    assert_averages(buffers, model, 1e-5)


def test_a_failed_step_leaves_no_trace() -> None:
    pipe = Pipeline(classifier(), 2, 3)
    before = {name: t.clone() for stage in pipe.stages.values() for name, t in stage.model.buffers.items()}
    with pytest.raises(HfGpipeError, match=r"'5' is given 1 value of each channel of a micro-batch, .* use fewer"):
        pipe.train_step(images(4, 1))
    after = {name: t for stage in pipe.stages.values() for name, t in stage.model.buffers.items()}
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    steps, model = STEPS[2:], classifier()
    assert_same(train(pipe, steps), plain_steps(model, steps, 3))
    assert_averages(after, model)


class Other(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


SHARED = nn.BatchNorm1d(2)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Other(2), "'1' is a Other, whose forward is not that of torch's BatchNorm"),
        (nn.BatchNorm1d(2, track_running_stats=False), "'1' is a BatchNorm1d without moving averages"),
        (nn.Sequential(SHARED, nn.Linear(2, 2), SHARED), "'1.2' and '1.0' are one BatchNorm1d"),
    ],
)
def test_what_is_refused(part: nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        Pipeline(nn.Sequential(nn.Linear(2, 2), part), 1)


def test_options_that_are_refused() -> None:
    with pytest.raises(UserError, match=r"'pipedream': '1' is a BatchNorm2d, .* use a synchronous schedule"):
        Pipeline(classifier(), 2, 3, "pipedream")
    with pytest.raises(UserError, match="torch_compile: Sequential has a BatchNorm"):
        Pipeline(classifier(), 2, 3, torch_compile=True)
