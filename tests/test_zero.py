"""ZeRO-1: replicas that share the update of their stage train as without, and each keeps its part of the state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, TrainerCallback
from transformers.optimization import AdafactorSchedule

from hf_gpipe import Pipeline
from hf_gpipe.checkpoint.state import FOLDER
from hf_gpipe.errors import UserError
from hf_gpipe.planner.costs.stage_costs import StageLayers
from hf_gpipe.planner.memory import MemoryBound
from hf_gpipe.runtime.shards import _wholes, treats_elements_alone
from hf_gpipe.settings.pipeline import PipelineConfig
from tests.gloo import run_gloo
from tests.oracle import padded_batch, plain_model, tiny_config
from tests.planner.models import MIB, blocks, planner, settings
from tests.training.toy import Recorder, StopAt, trainer, weights

Groups = list[dict[str, Any]]
Make = Callable[[Groups], torch.optim.Optimizer]
Weights = dict[str, torch.Tensor]

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
#: One for matrices and one for all else.
TWO = "Muon and AdamW"


def train(pipe: Pipeline, name: str, zero: int, start: Weights, num_steps: int = 2) -> tuple[Weights, int]:
    """Train from `start`, clipped. Returns this process's weights, and the elements of the optimizers' state."""
    with torch.no_grad():
        for path, parameter in pipe.named_parameters():
            parameter.copy_(start[path])
    pipe.step = 0
    trained = [p for p in pipe.parameters() if p.requires_grad]
    decayed, others = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if name == TWO:
        optimizers = [torch.optim.Muon(decayed, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]
    else:
        optimizers = [ALL[name]([group for group in groups if group["params"]])]
    if zero:
        for optimizer in optimizers:
            pipe.shard_optimizer(optimizer)

    def update(loss: torch.Tensor, norm: torch.Tensor) -> None:
        assert norm > 0.01, "clipped"
        pipe.clip_grad_norm_(0.01, norm)
        for optimizer in optimizers:
            optimizer.step()

    for seed in range(num_steps):
        pipe.train_step(padded_batch(pipe.adapter.config, seed=seed), update=update)
        for optimizer in optimizers:
            optimizer.zero_grad()
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    slots = [value for state in states for value in state.values() if torch.is_tensor(value)]
    values = {path: p.detach().clone() for path, p in pipe.named_parameters()}
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
    return {name: value for part in pipe.world.gather_objects(mine) for name, value in part.items()}


#: Model, stages, replicas, optimizers.
Run = tuple[str, int, int | tuple[int, ...], tuple[str, ...]]
SOME = ("adamw_torch_fused", "adafactor", "sgd")
#: By the number of processes. The embedding is tied to the head, and belongs to the first stage's replicas.
RUNS: dict[int, tuple[Run, ...]] = {
    3: (("llama", 2, (2, 1), (*ALL, TWO)), ("llama", 1, 3, SOME[:1]), ("lora", 2, (1, 2), SOME[:2])),
    4: (("llama", 2, 2, SOME[1:]), ("llama", 4, 2, SOME[:1])),
}


def _train_all(runs: tuple[Run, ...]) -> list[dict[str, Weights]]:
    found = []
    for model, num_stages, replicas, names in runs:
        counts = {"num_processes": 4} if num_stages == 4 else {}
        pipe = Pipeline(model_of(model), num_stages, 3, replicas=replicas, zero=1, **counts)
        start, own = starting_from(pipe), {}
        for name in names:
            shared, state = train(pipe, name, 1, start)
            if name in HONOURED:
                # The others are compared with one process alone.
                plain, plain_state = train(pipe, name, 0, start)
                for path, values in plain.items():
                    torch.testing.assert_close(shared[path], values, rtol=0, atol=1e-12, msg=f"{name}: {path}")
                least = min(len(pipe.world.placement.workers[stage]) for stage in pipe.world.local_stages)
                is_cut = name != "adafactor" and least > 1
                # Runs of elements: of each parameter a part, or one element more.
                assert state <= (plain_state / least + 4 * len(plain) if is_cut else plain_state), name
            everyone = pipe.world.gather_objects((shared, state))
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
        alone = Pipeline(model_of(model), 1, 3)
        start = starting_from(alone)
        for name in names:
            expected, _ = train(alone, name, 0, start)
            assert own[name].keys() == expected.keys()
            for parameter, values in expected.items():
                error = float((own[name][parameter] - values).abs().max())
                assert error < 1e-12, f"{model}, {name}: {parameter} is off by {error:.1e}"
            moved = [parameter for parameter, values in expected.items() if not torch.equal(values, start[parameter])]
            assert len(moved) == (12 if model == "lora" else len(start))


def test_an_optimizer_of_an_unknown_class_is_refused() -> None:
    class Mine(torch.optim.AdamW):
        """A step of its own could do anything."""

    parameters = [torch.nn.Parameter(torch.zeros(2))]
    for optimizer in (Mine(parameters), torch.optim.LBFGS(parameters)):
        with pytest.raises(UserError, match=r"zero is 1 and the optimizer is .*(Mine|LBFGS), of which it is not known"):
            treats_elements_alone(optimizer)
    pipe = Pipeline(tiny_config("llama"), 2)
    with pytest.raises(UserError, match="zero is 0; make the Pipeline with zero=1"):
        pipe.shard_optimizer(torch.optim.AdamW(pipe.parameters()))


def test_replicas_share_whole_parameters_evenly() -> None:
    sizes = {"a": 5, "b": 9, "c": 4, "d": 1}
    assert _wholes(sizes, 2) == {"b": [0, 9, 9], "a": [0, 0, 5], "c": [0, 0, 4], "d": [0, 1, 1]}


def test_zero_needs_replicas() -> None:
    assert PipelineConfig(2, replicas=(2, 1), zero=1).zero == 1
    with pytest.raises(UserError, match="zero is 1 and replicas is 1: no stage has replicas"):
        PipelineConfig(2, zero=1)
    with pytest.raises(UserError, match="zero: found 2"):
        PipelineConfig(2, replicas=2, zero=2)


# ---------------------------------------------------------------------- the size of the state


def test_the_planner_divides_the_state_and_the_update_by_the_replicas() -> None:
    made = planner(blocks(4), optim="adamw_torch")
    plain, shared = (made.plan(settings((3, 1), replicas=(2, 1), zero=zero, num_processes=3)) for zero in (0, 1))
    assert [one.memory.optimizer // MIB for one in plain.processes] == [60, 60, 20]
    assert [one.memory.optimizer // MIB for one in shared.processes] == [30, 30, 20]
    both = [MemoryBound(made.layout(one.settings)).stage_bytes(0, StageLayers(0, 3, "none")) for one in (plain, shared)]
    assert both[0] - both[1] == 30 * MIB


def _count_state() -> tuple[int, int, int]:
    """The bytes of AdamW's state in this process, of its parameters, and the planner's figure."""
    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    ids = torch.zeros(4, 8, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    pipe = Pipeline(config, replicas=2, zero=1, dtype="bfloat16", num_micro_batches=2)
    optimizer = torch.optim.AdamW(pipe.parameters())
    pipe.shard_optimizer(optimizer)
    for parameter in pipe.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = [value for slots in optimizer.state.values() for value in slots.values()]
    own = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    planned = pipe.world.from_main(lambda: pipe.plan(batch).processes[0].memory.optimizer)
    return own, sum(p.numel() * p.element_size() for p in pipe.parameters()), planned


def test_a_replica_keeps_its_part_of_the_state() -> None:
    for own, weight_bytes, planned in run_gloo(_count_state, 2):
        assert weight_bytes > 2 * 8e5, "bfloat16"
        assert own == pytest.approx(2 * weight_bytes / 2, rel=0.05)
        assert planned == pytest.approx(own, rel=0.05)


# ---------------------------------------------------------------------- training


def _train_until(folder: str, last: int, pipeline: dict[str, Any]) -> dict[str, Weights]:
    """With each optimizer from its last checkpoint, if there is one, to a step."""
    common = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "num_micro_batches": 3}
    found = {}
    for optim in RESUMED:
        callbacks = [StopAt(last)]
        made = trainer(
            Path(folder, optim), family="llama", dropout=0.2, callbacks=callbacks, optim=optim, **common | pipeline
        )
        assert made.train(resume_from_checkpoint=True).global_step == last
        found[optim] = weights(made)
    return found


#: One whose state is a value for each of a parameter's, and one whose state is of rows and columns.
RESUMED = ("adamw_torch_fused", "adafactor")
#: Number of processes, and how they are used.
LEGS = (
    (4, {"num_stages": 2, "replicas": 2, "zero": 1}),
    (3, {"num_stages": 3}),
    (3, {"num_stages": 1, "replicas": 3, "zero": 1}),
)


def test_a_training_goes_on_with_other_replicas_and_without(tmp_path: Path) -> None:
    whole = _train_until(str(tmp_path / "whole"), 3, {"num_stages": 1})
    for last, (num_processes, pipeline) in enumerate(LEGS, start=1):
        found = run_gloo(_train_until, num_processes, str(tmp_path / "run"), last, pipeline)[0]
    for optim in RESUMED:
        for name, values in whole[optim].items():
            torch.testing.assert_close(found[optim][name], values, rtol=0, atol=1e-5, msg=f"{optim}: {name}")
        last_one = tmp_path / "run" / optim / "checkpoint-3"
        plain = dict(AutoModelForCausalLM.from_pretrained(last_one).named_parameters())
        assert all(torch.equal(plain[name], values) for name, values in found[optim].items())
        Pipeline(str(last_one), 1).save_pretrained(tmp_path / "alone")
        for file in ("model.safetensors", "config.json", "generation_config.json"):
            assert (tmp_path / "alone" / file).read_bytes() == (last_one / file).read_bytes(), file
        files = [
            [*(tmp_path / run / optim / "checkpoint-3" / FOLDER).glob("*.safetensors")] for run in ("whole", "run")
        ]
        ours, theirs = ({key: value for file in one for key, value in load_file(file).items()} for one in files)
        assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}


class Overflow(TrainerCallback):
    """Before one step, makes the loss's scale so large that float16 cannot hold the gradients."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.made: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            self.made.scaler.scale = 2.0**60
            self.before = weights(self.made)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step + 1:
            now = weights(self.made)
            assert all(torch.equal(now[name], values) for name, values in self.before.items()), "nothing is updated"
            self.made.scaler.scale = 2.0**16


def _train_in_half_precision(folder: str) -> None:
    config, saving = tiny_config("llama"), {"save_strategy": "steps", "save_steps": 1}
    replicas = {"num_stages": 1, "replicas": 2, "family": "llama", "max_steps": 2}
    for optim in ("adafactor", "adagrad"):
        found = []
        for zero in (0, 1):
            half = Pipeline(plain_model(config, dtype=torch.bfloat16), 1, 2, replicas=2, zero=zero)
            values = {"fp32_master_weights": True, "optim": optim, "learning_rate": 1e-3, **saving, **replicas}
            made = trainer(Path(folder, f"{optim}-{zero}"), **values, zero=zero, model=half)
            made.train()
            copies = made.master_weights.copies  # type: ignore[union-attr]
            found.append((weights(made), sum(copy.numel() for copy in copies.values())))
        (plain, plain_size), (shared, size) = found
        assert abs(size - plain_size / 2) < plain_size / 20
        for name, tensor in plain.items():
            torch.testing.assert_close(shared[name], tensor, rtol=0, atol=1e-5, msg=f"{optim}: {name}")
        # Stopped after a step, and gone on with: equal to the last bit.
        half = Pipeline(plain_model(config, seed=7, dtype=torch.bfloat16), 1, 2, replicas=2, zero=1)
        again = trainer(Path(folder, "again"), **values, zero=1, model=half)
        again.train(resume_from_checkpoint=Path(folder, f"{optim}-1", "checkpoint-1"))
        assert all(torch.equal(weights(again)[name], tensor) for name, tensor in shared.items()), optim
    given = Pipeline(config, 1, 2, replicas=2, zero=1)
    adafactor = transformers.Adafactor(given.parameters(), warmup_init=True)
    made = trainer(Path(folder), **replicas, model=given, zero=1, optimizers=(adafactor, AdafactorSchedule(adafactor)))
    with pytest.raises(UserError, match="the scheduler is AdafactorSchedule, which reads the optimizer's state"):
        made.train()
    losses, longer = [], replicas | {"max_steps": 4}
    for zero in (0, 1):
        spy, recorder = Overflow(1), Recorder()
        made = trainer(Path(folder, "fp16"), fp16=True, zero=zero, callbacks=[spy, recorder], **longer)
        spy.made = made
        made.train()
        losses.append(recorder.losses)
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_float32_copies_are_shared_and_an_overflow_changes_nothing(tmp_path: Path) -> None:
    run_gloo(_train_in_half_precision, 2, str(tmp_path))
