"""PipeDream's schedules compute what the papers' delayed update rules say, applied to the whole plain model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hf_gpipe import Pipeline
from hf_gpipe.errors import StageError, UserError
from hf_gpipe.modes.asynchronous.versions import Versions
from hf_gpipe.schedule import Action, num_stashes
from hf_gpipe.schedule.kinds import UPDATE
from hf_gpipe.settings.pipeline import PipelineConfig
from tests.gloo import run_gloo
from tests.oracle import Batch, padded_batch, plain_model, tiny_config

Weights = dict[str, torch.Tensor]
Optimizer = Callable[[Any], torch.optim.Optimizer]
ROWS, MAX_NORM = 4, 0.01

#: Near 0 an adaptive step is lr / eps times the gradient, so a small eps makes numbers of the rounding of its zeros.
#: Adafactor's is so small; it is for one micro-batch, whose gradients are rounded as the plain model's.
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, weight_decay=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, eps=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


def version(schedule: str, stage: int, replicas: Sequence[int], size: int, micro_batch: int) -> int:
    """The version that a micro-batch reads on a stage by the papers' formulas, before its backward.

    ceil(n / r) micro-batches are in flight on each of the r replicas of a stage, n being the workers from it on.
    """
    if schedule == "pipedream_2bw":
        return max(micro_batch // size - 1, 0)
    if schedule == "pipedream_vertical":
        stage = 0
    late = (math.ceil(sum(replicas[stage:]) / replicas[stage]) - 1) * replicas[stage]
    return max((micro_batch - late) // size, 0)


def expected(
    model: PreTrainedModel,
    stage_of: Mapping[str, int],
    schedule: str,
    windows: Sequence[Sequence[Batch]],
    size: int,
    make: Optimizer,
    gradients_of: Callable[[int, int, Callable[[], None]], tuple[float, Weights]],
    replicas: Sequence[int] | None = None,
) -> tuple[list[float], Weights]:
    """A plain loop over whole updates: every gradient is computed with the weights that the rule names.

    Args:
        model: what is trained, in place.
        stage_of: the stage of each parameter.
        schedule: whose rule.
        windows: one batch for each step.
        size: micro-batches per step.
        make: the optimizer of the whole model.
        gradients_of: loss and gradients of a micro-batch (step, number) with the present weights of `model`. It calls
            its last argument between forward and backward.
        replicas: of each stage; None: one of each.

    Returns:
        Loss and norm of the gradient of each step, and the weights after the last one.
    """
    parameters, num_stages = dict(model.named_parameters()), 1 + max(stage_of.values())
    replicas = replicas or [1] * num_stages
    optimizer = make(parameters.values())
    history = [{name: p.detach().clone() for name, p in parameters.items()}]
    numbers: list[float] = []

    @torch.no_grad()
    def put(versions: Callable[[str], int]) -> None:
        for name, parameter in parameters.items():
            parameter.copy_(history[versions(name)][name])

    def overwrite() -> None:
        """Without stashes the backward finds the newest weights where those of its forward were."""
        if schedule == "pipedream_naive":
            with torch.autograd._unsafe_preserve_version_counter(tuple(parameters.values())):
                put(lambda name: len(history) - 1)

    for first, last in windows_of(windows):
        for step in range(first, last):
            total: Weights = {}
            losses = 0.0
            for number in range(size):

                def reads(name: str, first: int = first, m: int = (step - first) * size + number) -> int:
                    return first + version(schedule, stage_of[name], replicas, size, m)

                put(reads)
                loss, gradients = gradients_of(step, number, overwrite)
                losses += loss
                total = {name: gradient + total.get(name, 0) for name, gradient in gradients.items()}
            put(lambda name: len(history) - 1)
            numbers += [losses, float(torch.stack([total[name].norm() for name in parameters]).norm())]
            for stage in range(num_stages):
                own = [name for name in parameters if stage_of[name] == stage]
                for name in own:
                    parameters[name].grad = total[name]
                torch.nn.utils.clip_grad_norm_([parameters[name] for name in own], MAX_NORM)
            optimizer.step()
            history.append({name: p.detach().clone() for name, p in parameters.items()})
    return numbers, history[-1]


def windows_of(windows: Sequence[Sequence[Batch]]) -> list[tuple[int, int]]:
    """The first step of each window, and the one after its last."""
    ends = [sum(map(len, windows[:count])) for count in range(len(windows) + 1)]
    return list(pairwise(ends))


def run(pipe: Pipeline, windows: Sequence[Sequence[Batch]], make: Optimizer) -> tuple[list[float], Weights]:
    """Train, clipped per stage; loss and norm of the gradient of each step, and the weights of all processes."""
    optimizers = {stage: make(list(model.parameters.values())) for stage, model in pipe.models.items()}

    def update(stage: int, step: int, norm: torch.Tensor) -> None:
        assert norm > MAX_NORM, "clipped"
        pipe.clip_stage_grad_norm_(stage, MAX_NORM, norm)
        optimizers[stage].step()

    numbers: list[float] = []
    for batches in windows:
        numbers += pipe.train_window([[batch] for batch in batches], update).flatten().tolist()
    mine = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    whole: Weights = {}
    for name, parameter in (one for part in pipe.world.gather_objects(mine) for one in part.items()):
        assert torch.equal(whole.setdefault(name, parameter), parameter), f"{name} differs between replicas"
    return numbers, whole


def close(found: Weights, wanted: Weights) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-10, msg=name)


#: Each value of each setting with several of the others.
CASES = [
    # schedule, K, micro-batches per step, steps, optimizer, recompute
    ("pipedream", 1, 2, 2, "adamw", "none"),
    ("pipedream", 2, 1, 4, "adafactor", "block"),
    ("pipedream", 4, 1, 7, "adamw", "stage"),
    ("pipedream", 3, 2, 4, "momentum", (1, "none", 1)),
    ("pipedream_vertical", 3, 1, 5, "momentum", "none"),
    ("pipedream_vertical", 4, 2, 4, "adamw", "block"),
    ("pipedream_2bw", 2, 2, 4, "rmsprop", "stage"),
    ("pipedream_2bw", 4, 4, 3, "adamw", "none"),
    ("pipedream_2bw", 4, 1, 5, "momentum", "none"),
    ("pipedream_naive", 3, 1, 5, "momentum", "none"),
    ("pipedream_naive", 4, 2, 4, "adamw", "block"),
]


def check(
    schedule: str,
    num_stages: int,
    size: int,
    num_steps: int,
    optimizer: str,
    recompute: Any,
    replicas: tuple[int, ...] | None = None,
) -> None:
    config, make = tiny_config("llama", tied=False), OPTIMIZERS[optimizer]
    pipe = Pipeline(plain_model(config), num_stages, size, schedule, recompute, replicas=replicas or 1)
    batches = [padded_batch(config, ROWS, seed) for seed in range(num_steps)]
    places = {name: p.data_ptr() for name, p in pipe.named_parameters()}
    found = run(pipe, [batches], make)
    assert {name: p.data_ptr() for name, p in pipe.named_parameters()} == places
    assert pipe.window is not None
    assert pipe.window.steps == (size,) * num_steps
    sizes = {stage: sum(p.nbytes for p in model.parameters.values()) for stage, model in pipe.models.items()}
    rank = pipe.world.rank
    assert pipe.stash_bytes == sum(num_stashes(pipe.window, stage, rank) * size for stage, size in sizes.items())
    model = plain_model(config)
    if schedule == "pipedream_naive" and recompute == "block":
        # Elsewhere a recomputed block is the block of the forward.
        model.train()
        for module in model.modules():
            if hasattr(module, "gradient_checkpointing"):
                module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
                module.gradient_checkpointing = True

    def gradients_of(step: int, number: int, between: Callable[[], None]) -> tuple[float, Weights]:
        own = {name: torch.tensor_split(tensor, size)[number] for name, tensor in batches[step].items()}
        # Divided before the backward, as in the pipeline: eager attention has a float32 softmax, which rounds by scale.
        model.zero_grad()
        logits = model(**own, use_cache=False).logits[:, :-1]
        count = int((batches[step]["labels"][:, 1:] != -100).sum())
        loss = F.cross_entropy(logits.flatten(0, 1), own["labels"][:, 1:].flatten(), reduction="sum") / count
        between()
        loss.backward()
        return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    numbers, weights = expected(model, pipe.ties.owner_stage, schedule, [batches], size, make, gradients_of, replicas)
    assert found[0] == pytest.approx(numbers, abs=1e-10)
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

    def gradients_of(step: int, number: int, between: Callable[[], None]) -> tuple[float, Weights]:
        one.step = step
        one.zero_grad()
        loss = float(one.train_step(batches[step]))
        return loss, {name: p.grad.clone() for name, p in one.named_parameters() if p.grad is not None}

    numbers, weights = expected(
        model, pipe.ties.owner_stage, "pipedream", [batches[:3], batches[3:]], 1, make, gradients_of
    )
    assert found[0] == pytest.approx(numbers, abs=1e-10)
    close(found[1], weights)


#: The number of replicas of each stage, by the number of processes.
REPLICATED: dict[int, list[tuple[Any, ...]]] = {
    3: [
        ("pipedream", 2, 2, 5, "momentum", "none", (2, 1)),
        ("pipedream_vertical", 2, 2, 4, "adamw", "stage", (1, 2)),
        ("pipedream_2bw", 2, 4, 4, "momentum", "block", (2, 1)),
    ],
    4: [
        ("pipedream", 2, 2, 5, "adamw", "stage", (2, 2)),
        ("pipedream_2bw", 2, 2, 4, "rmsprop", "none", (2, 2)),
        ("pipedream_naive", 2, 2, 4, "momentum", "none", (2, 2)),
    ],
}


def check_replicated(cases: list[tuple[Any, ...]]) -> None:
    for case in cases:
        check(*case)


@pytest.mark.parametrize("num_processes", REPLICATED)
def test_replicas_update_together(num_processes: int) -> None:
    """Every replica has the weights of the plain loop, whose gradients know nothing of replicas."""
    run_gloo(check_replicated, num_processes, REPLICATED[num_processes])


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
        ({"replicas": 2, "zero": 1}, "schedule is pipedream and zero is 1"),
        ({"replicas": "auto", "num_processes": 2}, "schedule is pipedream and replicas is auto"),
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

    with pytest.raises(
        StageError, match=r"stage 0, action 0U1: ValueError: enough \(action \d+ of \d+ of this process: .*\S+ >0U1< "
    ):
        pipe.train_window(batches, update)
    (row,) = pipe.schedule([1] * 4).actions
    done = row[: row.index(Action(UPDATE, 0, step=1))]
    for stage, model in pipe.models.items():
        newest = sum(action.kind == UPDATE and action.stage == stage for action in done)
        assert newest >= 1
        assert all(torch.all(p == newest) for p in model.parameters.values())
    pipe.train_window(batches, lambda stage, step, norm: None)


def test_a_stash_that_nothing_reads_any_more_takes_the_next_copy() -> None:
    """The memory where the weights were before the window was idle, one copy of a stage's weights."""
    weight = torch.nn.Parameter(torch.zeros(4))
    home, memory = weight.data_ptr(), set[int]()
    versions = Versions([weight])
    versions.begin()
    for step in range(6):
        with versions.updating(keeps=True), torch.no_grad():
            weight += 1
        memory.add(weight.data_ptr())
        with versions.reading(step, is_last=True):
            assert torch.equal(weight, torch.full((4,), float(step)))
            memory.add(weight.data_ptr())
    assert len(memory) == 2
    versions.end()
    assert weight.data_ptr() == home
    assert torch.equal(weight, torch.full((4,), 6.0))
