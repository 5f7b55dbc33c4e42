"""ZeRO-1: replicas that share the update of their stage train as without, and each keeps its part of the state."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, TrainerCallback

from hf_gpipe import Pipeline
from hf_gpipe.errors import UserError
from hf_gpipe.recipe import PipelineConfig
from hf_gpipe.runtime.shards import treats_elements_alone
from tests.gloo import run_gloo
from tests.oracle import padded_batch, plain_model, tiny_config
from tests.training.toy import Recorder, trainer, weights

Groups = list[dict[str, Any]]
Make = Callable[[Groups], torch.optim.Optimizer]

#: Those that the trainer honours; adagrad has a state before its first step.
HONOURED: dict[str, Make] = {
    "adamw_torch_fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "adamw_torch": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=True),
    "adafactor": lambda groups: transformers.Adafactor(groups, lr=1e-2, scale_parameter=False, relative_step=False),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, initial_accumulator_value=0.1),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, momentum=0.9, centered=True),
}
#: Those that a caller may also give.
GIVEN: dict[str, Make] = {
    "adafactor, scaled by the parameter": lambda groups: transformers.Adafactor(groups, warmup_init=True),
    "Adafactor of torch": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True, foreach=False),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "RAdam": lambda groups: torch.optim.RAdam(groups, lr=1e-2),
    "Adamax": lambda groups: torch.optim.Adamax(groups, lr=1e-2),
    "Adadelta": lambda groups: torch.optim.Adadelta(groups),
    "ASGD": lambda groups: torch.optim.ASGD(groups, lr=1e-2),
    "Rprop": lambda groups: torch.optim.Rprop([{"params": group["params"]} for group in groups], lr=1e-3),
}
ALL = HONOURED | GIVEN
Weights = dict[str, torch.Tensor]


def train(pipe: Pipeline, make: Make, zero: int, start: Weights, num_steps: int = 5) -> tuple[Weights, int]:
    """Train from `start`, clipped. Returns this process's weights, and the elements of its optimizer's state."""
    with torch.no_grad():
        for name, parameter in pipe.named_parameters():
            parameter.copy_(start[name])
    pipe.step = 0
    trained = [p for p in pipe.parameters() if p.requires_grad]
    decayed, others = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = make([group for group in groups if group["params"]])
    if zero:
        pipe.shard_optimizer(optimizer)

    def update(loss: torch.Tensor, norm: torch.Tensor) -> None:
        assert norm > 0.01, "clipped"
        pipe.clip_grad_norm_(0.01, norm)
        optimizer.step()

    for seed in range(num_steps):
        pipe.train_step(padded_batch(pipe.adapter.config, seed=seed), update=update)
        optimizer.zero_grad()
    slots = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    values = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    return values, sum(slot.numel() for slot in slots if slot.dim())


def model_of(kind: str) -> Any:
    plain = plain_model(tiny_config("llama", tied=True))
    if kind == "lora":
        peft = pytest.importorskip("peft")
        torch.manual_seed(1)
        plain = peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).double()
    return plain


def starting_from(pipe: Pipeline) -> Weights:
    mine = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    return {name: value for part in pipe.topology.gather_objects(mine) for name, value in part.items()}


#: Model, stages, replicas, optimizers.
Run = tuple[str, int, int | tuple[int, ...], tuple[str, ...]]
SOME = ("adamw_torch_fused", "adafactor", "sgd")
#: By the number of processes. The embedding is tied to the head, and belongs to the first stage's replicas.
RUNS: dict[int, tuple[Run, ...]] = {
    3: (("llama", 2, (2, 1), tuple(ALL)), ("llama", 1, 3, SOME), ("lora", 2, (1, 2), SOME)),
    4: (("llama", 2, 2, SOME), ("llama", 4, 2, SOME)),
}


def _train_all(runs: tuple[Run, ...]) -> list[dict[str, Weights]]:
    found = []
    for model, num_stages, replicas, names in runs:
        counts = {"num_processes": 4} if num_stages == 4 else {}
        pipe = Pipeline(model_of(model), num_stages, 4, replicas=replicas, zero=1, **counts)
        start, own = starting_from(pipe), {}
        for name in names:
            plain, plain_state = train(pipe, ALL[name], 0, start)
            shared, state = train(pipe, ALL[name], 1, start)
            for parameter, values in plain.items():
                torch.testing.assert_close(shared[parameter], values, rtol=0, atol=1e-12, msg=f"{name}: {parameter}")
            stages = pipe.topology.local_stages
            most = min(len(pipe.topology.placement.workers[stage]) for stage in stages)
            assert state <= plain_state
            if "adafactor" not in name.lower() and most > 1:
                # Runs of elements: of each parameter a part, or one element more.
                assert state <= plain_state / most + 4 * len(plain), name
            everyone = pipe.topology.gather_objects((shared, state))
            own[name] = {}
            for part, _ in everyone:
                for parameter, values in part.items():
                    assert torch.equal(own[name].setdefault(parameter, values), values), "replicas are equal"
        found.append(own)
    return found


@pytest.mark.parametrize("num_processes", RUNS)
def test_the_numbers_are_those_without_and_of_one_process(num_processes: int) -> None:
    found = run_gloo(_train_all, num_processes, RUNS[num_processes])[0]
    for (model, *_, names), own in zip(RUNS[num_processes], found, strict=True):
        alone = Pipeline(model_of(model), 1, 4)
        start = starting_from(alone)
        for name in names:
            expected, _ = train(alone, ALL[name], 0, start)
            assert own[name].keys() == expected.keys()
            for parameter, values in expected.items():
                error = float((own[name][parameter] - values).abs().max())
                assert error < 1e-12, f"{model}, {name}: {parameter} is off by {error:.1e}"
            moved = [parameter for parameter, values in expected.items() if not torch.equal(values, start[parameter])]
            assert len(moved) == (12 if model == "lora" else len(start))
