"""PipeDream's schedules compute what the papers' delayed update rules say, applied to the whole plain model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_gpipe import Pipeline
from hf_gpipe.errors import StageError, UserError
from hf_gpipe.recipe import PipelineConfig
from hf_gpipe.schedule import Action, ActionKind, num_stashes
from tests.oracle import Batch, padded_batch, plain_model, run_plain, tiny_config

Weights = dict[str, torch.Tensor]
Optimizer = Callable[[Any], torch.optim.Optimizer]
ROWS, MAX_NORM = 4, 0.01

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


def version(schedule: str, late: int, num_stages: int, size: int, micro_batch: int) -> int:
    """The version that a micro-batch reads on a stage by the papers' formulas; `late` is K-s-1 of stage s."""
    if schedule == "pipedream_2bw":
        return max(micro_batch // size - 1, 0)
    return max((micro_batch - (late if schedule == "pipedream" else num_stages - 1)) // size, 0)


def expected(
    model: PreTrainedModel,
    stage_of: Mapping[str, int],
    schedule: str,
    windows: Sequence[Sequence[Batch]],
    size: int,
    make: Optimizer,
    gradients_of: Callable[[int, int], tuple[float, Weights]],
) -> tuple[list[float], Weights]:
    """A plain loop over whole updates: every gradient is computed with the weights that the rule names.

    Args:
        model: what is trained, in place.
        stage_of: the stage of each parameter.
        schedule: whose rule.
        windows: one batch for each step.
        size: micro-batches per step.
        make: the optimizer of the whole model.
        gradients_of: loss and gradients of a micro-batch (step, number) with the present weights of `model`.
    """
    parameters, num_stages = dict(model.named_parameters()), 1 + max(stage_of.values())
    optimizer = make(parameters.values())
    history = [{name: p.detach().clone() for name, p in parameters.items()}]
    losses = []

    @torch.no_grad()
    def put(versions: Callable[[str], int]) -> None:
        for name, parameter in parameters.items():
            parameter.copy_(history[versions(name)][name])

    for first, last in windows_of(windows):
        for step in range(first, last):
            total: Weights = {}
            losses.append(0.0)
            for number in range(size):

                def reads(name: str, first: int = first, m: int = (step - first) * size + number) -> int:
                    return first + version(schedule, num_stages - 1 - stage_of[name], num_stages, size, m)

                put(reads)
                loss, gradients = gradients_of(step, number)
                losses[-1] += loss
                total = {name: gradient + total.get(name, 0) for name, gradient in gradients.items()}
            put(lambda name: len(history) - 1)
            for stage in range(num_stages):
                own = [name for name in parameters if stage_of[name] == stage]
                for name in own:
                    parameters[name].grad = total[name]
                torch.nn.utils.clip_grad_norm_([parameters[name] for name in own], MAX_NORM)
            optimizer.step()
            history.append({name: p.detach().clone() for name, p in parameters.items()})
    return losses, history[-1]


def windows_of(windows: Sequence[Sequence[Batch]]) -> list[tuple[int, int]]:
    """The first step of each window, and the one after its last."""
    ends = [sum(map(len, windows[:count])) for count in range(len(windows) + 1)]
    return list(pairwise(ends))


def run(pipe: Pipeline, windows: Sequence[Sequence[Batch]], make: Optimizer) -> tuple[list[float], Weights]:
    """Train, clipped per stage; the losses, and the weights of all processes."""
    optimizers = {stage: make(list(model.parameters.values())) for stage, model in pipe.models.items()}

    def update(stage: int, step: int, norm: torch.Tensor) -> None:
        assert norm > MAX_NORM, "clipped"
        pipe.clip_stage_grad_norm_(stage, MAX_NORM, norm)
        optimizers[stage].step()

    losses: list[float] = []
    for batches in windows:
        losses += pipe.train_window([[batch] for batch in batches], update)[:, 0].tolist()
    mine = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    return losses, {name: p for part in pipe.topology.gather_objects(mine) for name, p in part.items()}


def close(found: Weights, wanted: Weights) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-10, msg=name)


#: Each value of each setting with several of the others.
CASES = [
    # schedule, K, micro-batches per step, steps, optimizer, recompute
    ("pipedream", 1, 2, 2, "adamw", "none"),
    ("pipedream", 2, 1, 4, "momentum", "block"),
    ("pipedream", 4, 1, 7, "adamw", "stage"),
    ("pipedream", 3, 2, 4, "adafactor", (1, "none", 1)),
    ("pipedream_vertical", 3, 1, 5, "momentum", "none"),
    ("pipedream_vertical", 4, 2, 4, "adamw", "block"),
    ("pipedream_2bw", 2, 2, 4, "adafactor", "stage"),
    ("pipedream_2bw", 4, 4, 3, "adamw", "none"),
    ("pipedream_2bw", 4, 1, 5, "momentum", "none"),
]


def check(schedule: str, num_stages: int, size: int, num_steps: int, optimizer: str, recompute: Any) -> None:
    config, make = tiny_config("llama", tied=False), OPTIMIZERS[optimizer]
    pipe = Pipeline(plain_model(config), num_stages, size, schedule, recompute)
    batches = [padded_batch(config, ROWS, seed) for seed in range(num_steps)]
    places = {name: p.data_ptr() for name, p in pipe.named_parameters()}
    found = run(pipe, [batches], make)
    assert {name: p.data_ptr() for name, p in pipe.named_parameters()} == places
    assert pipe.window is not None
    assert pipe.window.steps == (size,) * num_steps
    sizes = {stage: sum(p.nbytes for p in model.parameters.values()) for stage, model in pipe.models.items()}
    assert pipe.stash_bytes == sum(num_stashes(pipe.window, stage) * size for stage, size in sizes.items())
    model = plain_model(config)

    def gradients_of(step: int, number: int) -> tuple[float, Weights]:
        own = {name: torch.tensor_split(tensor, size)[number] for name, tensor in batches[step].items()}
        result = run_plain(model, own, 1)
        share = int((own["labels"][:, 1:] != -100).sum()) / int((batches[step]["labels"][:, 1:] != -100).sum())
        return share * result.loss, {name: share * gradient for name, gradient in result.gradients.items()}

    losses, weights = expected(model, pipe.ties.owner_stage, schedule, [batches], size, make, gradients_of)
    assert found[0] == pytest.approx(losses, abs=1e-10)
    close(found[1], weights)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_window_is_the_papers_rule(case: tuple[Any, ...]) -> None:
    check(*case)


def test_dropout_is_that_of_one_stage() -> None:
    """And a second window starts without delay, from where the first one has ended."""
    config, make = tiny_config("llama", tied=False, dropout=0.2), OPTIMIZERS["adamw"]
    pipe = Pipeline(plain_model(config), 3, 1, "pipedream", "stage")
    batches = [padded_batch(config, ROWS, seed) for seed in range(5)]
    found = run(pipe, [batches[:3], batches[3:]], make)
    model = plain_model(config)
    one = Pipeline(model, 1, 1)

    def gradients_of(step: int, number: int) -> tuple[float, Weights]:
        one.step = step
        one.zero_grad()
        loss = float(one.train_step(batches[step]))
        return loss, {name: p.grad.clone() for name, p in one.named_parameters() if p.grad is not None}

    losses, weights = expected(
        model, pipe.ties.owner_stage, "pipedream", [batches[:3], batches[3:]], 1, make, gradients_of
    )
    assert found[0] == pytest.approx(losses, abs=1e-10)
    close(found[1], weights)


def test_what_it_cannot_train() -> None:
    tied = plain_model(tiny_config("llama"))
    with pytest.raises(UserError, match=r"'pipedream': model.embed_tokens.weight is tied, stages \[0, 1\] train it"):
        Pipeline(tied, 2, 1, "pipedream")
    batch = padded_batch(tied.config, ROWS)
    with pytest.raises(UserError, match="call train_window"):
        Pipeline(tied, 1, 1, "pipedream").train_step(batch)
    with pytest.raises(UserError, match=r"'gpipe' updates all stages together; call train_step"):
        Pipeline(tied, 1, 1).train_window([[batch]], lambda stage, step, norm: None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 2}, "schedule is pipedream and replicas is 2"),
        ({"torch_compile": True}, "schedule is pipedream and torch_compile is true"),
        ({"num_stages": "auto", "num_processes": 2}, "schedule is pipedream and num_stages is auto"),
    ],
)
def test_what_its_settings_exclude(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PipelineConfig(**{"num_stages": 2, "schedule": "pipedream", **settings})


def test_a_failed_window_leaves_the_newest_weights_and_no_stash() -> None:
    config = tiny_config("llama", tied=False)
    pipe = Pipeline(plain_model(config), 3, 1, "pipedream")
    batches = [[padded_batch(config, ROWS, seed)] for seed in range(4)]

    def update(stage: int, step: int, norm: torch.Tensor) -> None:
        if (stage, step) == (0, 1):
            raise ValueError("enough")
        with torch.no_grad():
            for parameter in pipe.models[stage].parameters.values():
                parameter.fill_(step + 1)

    with pytest.raises(StageError, match=r"stage 0, action 0U1: ValueError: enough"):
        pipe.train_window(batches, update)
    (row,) = pipe.schedule([1] * 4).actions
    done = row[: row.index(Action(ActionKind.UPDATE, 0, step=1))]
    for stage, model in pipe.models.items():
        newest = sum(action.kind == ActionKind.UPDATE and action.stage == stage for action in done)
        assert newest >= 1
        assert all(torch.all(p == newest) for p in model.parameters.values())
    pipe.train_window(batches, lambda stage, step, norm: None)
