"""Updates of visiting weights beside the next step's forwards: every number is that of a run whose weights stay."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from hf_gpipe import PipelineTrainer
from hf_gpipe.data import PairCollator
from hf_gpipe.errors import NonFiniteError, StageError
from hf_gpipe.model.clone import exact_clone
from hf_gpipe.modes.visits.late_updates import LATE_UPDATE
from hf_gpipe.training import optim
from hf_gpipe.training.updates import callbacks_of_update
from scripts.families import default_config
from tests.gloo import run_gloo
from tests.oracle import VOCABULARY
from tests.training.toy import CausalRows, Rows, StopAt, arguments, weights

STAYS = {"num_stages": 4, "schedule": "breadth_first", "recompute": "stage"}
COMES = STAYS | {"offload_weights": "all"}
#: The norms of these models' gradients are larger.
CLIPS = {"max_grad_norm": 0.05}
#: The modules that LoRA adapts.
ADAPTED: dict[str, Any] = {"qwen3": "all-linear", "qwen3_moe": ["q_proj", "v_proj"]}
MASTERS = {"dtype": torch.bfloat16, "fp32_master_weights": True}


def made(folder: Path, family: str = "llama", **values: Any) -> PipelineTrainer:
    config = default_config(family)
    config.vocab_size, config.tie_word_embeddings = VOCABULARY, family == "t5"
    names = "callbacks", "eval_dataset"
    given = {name: values.pop(name) for name in names if name in values}
    return PipelineTrainer(
        exact_clone(config, values.pop("dtype", torch.float32)),
        arguments(folder, **CLIPS | values),
        train_dataset=Rows() if family == "t5" else CausalRows(),
        data_collator=PairCollator(pad_token_id=0),
        peft_config=LoraConfig(r=2, target_modules=ADAPTED[family]) if family in ADAPTED else None,
        **given,
    )


def trained(folder: Path, family: str = "llama", *, resumed: Path | None = None, **values: Any) -> PipelineTrainer:
    trainer = made(folder, family, **values)
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    return trainer


def numbers(trainer: PipelineTrainer) -> tuple[dict[str, torch.Tensor], list[tuple[Any, ...]]]:
    """The weights, and what was logged: losses, norms, rates and metrics."""
    kept = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    return weights(trainer), [tuple(entry.get(name) for name in kept) for entry in trainer.state.log_history]


def assert_equal(found: PipelineTrainer, expected: PipelineTrainer) -> None:
    mine, theirs = numbers(found), numbers(expected)
    assert mine[1][:-1] == theirs[1][:-1], "the last entry has the speed of the training"
    assert all(torch.equal(tensor, theirs[0][name]) for name, tensor in mine[0].items())


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The stages that are updated late, each with whether another thread than the main one does so."""
    noted: list[tuple[int, bool]] = []
    step_stage = optim.step_stage

    def note(trainer: Any, stage: int, options: Any = None) -> None:
        if options is not None:
            noted.append((stage, threading.current_thread() is not threading.main_thread()))
        step_stage(trainer, stage, options)

    monkeypatch.setattr(optim, "step_stage", note)
    return noted


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama", {}),
        ("llama", {"gradient_accumulation_steps": 2, "max_steps": 3}),
        ("llama", {"max_grad_norm": 0.0}),
        ("llama", {"optim": "sgd", "lr_scheduler_type": "cosine", "warmup_steps": 2}),
        ("llama", {"resident_stages": 2, "num_stages": 5}),
        ("llama", MASTERS),
        ("qwen3", {}),
        ("mixtral", {}),
        ("t5", {"num_stages": 5}),
    ],
)
def test_the_numbers_of_updates_at_the_end(
    tmp_path: Path, threads: list[tuple[int, bool]], family: str, values: dict[str, Any]
) -> None:
    """To the last bit, and all but the last update run in a thread, in the order of the next step's forwards."""
    stays = trained(tmp_path / "stays", family, **STAYS | values | {"resident_stages": 0})
    assert not threads
    comes = trained(tmp_path / "comes", family, **COMES | values)
    assert_equal(comes, stays)
    visiting = sorted(comes.pipe.weights.late.parameters)
    count = len(visiting) * (comes.state.max_steps - 1)
    assert [stage for stage, _ in threads] == visiting * comes.state.max_steps
    # The last update is made when the training ends.
    assert [is_beside for _, is_beside in threads] == [True] * count + [False] * len(visiting)


def test_frozen_experts_that_visit_have_no_late_updates(tmp_path: Path) -> None:
    stays = trained(tmp_path / "stays", "qwen3_moe", **STAYS)
    comes = trained(tmp_path / "comes", "qwen3_moe", **STAYS, offload_weights="experts")
    assert_equal(comes, stays)
    assert LATE_UPDATE in made(tmp_path / "all", **COMES).pipe.schedule(2).kinds
    assert LATE_UPDATE not in comes.pipe.schedule(2).kinds


class Reads(TrainerCallback):
    """Notes weights, in tensors that it has from the beginning, and the optimizer's state after each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, ...]] = []
        self._parameters: list[torch.nn.Parameter] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._parameters = list(given["model"].parameters())

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        moments = [given["optimizer"].state[p]["exp_avg"] for p in self._parameters]
        self.seen.append(tuple(one.detach().clone() for one in (*self._parameters, *moments)))


def test_who_reads_between_steps_reads_what_is_updated(tmp_path: Path, threads: list[tuple[int, bool]]) -> None:
    """A callback of a user, evaluations and checkpoints. No update is then beside forwards."""
    values = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    seen = []
    for name, options in (("stays", STAYS), ("comes", COMES)):
        callback = Reads()
        trained(tmp_path / name, **options, **values, eval_dataset=CausalRows(4), callbacks=[callback])
        seen.append(callback.seen)
    assert len(seen[0]) == 4
    for mine, theirs in zip(*seen, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
    assert threads
    assert not any(is_beside for _, is_beside in threads)


@pytest.mark.parametrize("read", ["parameters", "model", "models", "state_dict", "save", "evaluate", "generate"])
def test_a_pipeline_that_is_read_after_a_step_has_its_update(tmp_path: Path, read: str) -> None:
    """Also where nobody else has waited for it: inside of a training, say in the callback of a library."""
    trainers = [made(tmp_path / name, **options) for name, options in (("stays", STAYS), ("comes", COMES))]
    found = []
    for trainer in trainers:
        batch = trainer.data_collator([CausalRows()[i] for i in range(4)])
        trainer.create_optimizer_and_scheduler(10)
        optim.prepare_optimizer(trainer, 10)
        for step in range(2):
            trainer.pipe.train_on([batch], None, lambda loss, norm, t=trainer, n=step: optim.step_late(t, n))
            trainer.pipe.zero_grad()
        late = trainer.pipe.weights.late
        assert len(list(late.parameters)) == (0 if trainer is trainers[0] else 4)
        assert all(stage in late for stage in late.parameters)
        pipe = trainer.pipe
        readers = {
            "parameters": lambda pipe=pipe: [p.detach().clone() for p in pipe.parameters()],
            "model": lambda pipe=pipe: [p.detach().clone() for p in pipe.model.parameters()],
            "models": lambda pipe=pipe: [
                p.detach().clone() for m in pipe.models.values() for p in m.model.parameters()
            ],
            "state_dict": lambda t=trainer: [
                slots["exp_avg"].clone() for _, slots in sorted(t.made_optimizer().state_dict()["state"].items())
            ],
            "save": lambda pipe=pipe, t=trainer: _saved(pipe, Path(t.args.output_dir) / "model"),
            "evaluate": lambda pipe=pipe, b=batch: [torch.tensor(pipe.eval_step(b).loss)],
            "generate": lambda pipe=pipe, b=batch: [
                pipe.generate(**{n: b[n] for n in ("input_ids", "attention_mask")}, max_new_tokens=4)
            ],
        }
        found.append(readers[read]())
        if read != "generate":
            assert not any(stage in late for stage in late.parameters)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True) if one.device.type != "meta")


def test_a_learning_rate_that_is_a_tensor(tmp_path: Path) -> None:
    """A schedule changes it in place, while updates wait that are to have it as it was."""
    found = []
    for changes in (False, True):
        trainer = made(tmp_path / str(changes), **COMES, optim="adamw_torch")
        optimizer = optim.prepare_optimizer(trainer, 10)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(1e-2)
        batch = trainer.data_collator([CausalRows()[i] for i in range(4)])
        trainer.pipe.train_on([batch], None, lambda loss, norm, t=trainer: optim.step_late(t, 1))
        for group in optimizer.param_groups if changes else ():
            group["lr"].fill_(1.0)
        found.append(weights(trainer))
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


def _saved(pipe: Any, folder: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    pipe.save_pretrained(folder)
    tensors = {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}
    return [tensors[name] for name in sorted(tensors)]


def test_a_run_resumes_with_and_without(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    stays = trained(tmp_path / "stays", **STAYS, **saving)
    comes = trained(tmp_path / "comes", **COMES, **saving)
    assert_equal(comes, stays)
    again = trained(tmp_path / "again", **COMES, resumed=tmp_path / "stays" / "checkpoint-2")
    back = trained(tmp_path / "back", **STAYS, resumed=tmp_path / "comes" / "checkpoint-4")
    for other in (again, back):
        assert_equal(other, stays)


def test_a_run_that_a_callback_stops_has_the_last_update(tmp_path: Path) -> None:
    stays, comes = (
        trained(tmp_path / name, **options, callbacks=[StopAt(3)]) for name, options in (("s", STAYS), ("c", COMES))
    )
    assert comes.state.global_step == 3
    assert_equal(comes, stays)


def test_the_best_model_is_loaded_over_the_last_update(tmp_path: Path) -> None:
    values = {
        **{"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2},
        **{"load_best_model_at_end": True, "learning_rate": 2.0},
    }
    stays, comes = (
        trained(tmp_path / name, **options, **values, eval_dataset=CausalRows(4))
        for name, options in (("stays", STAYS), ("comes", COMES))
    )
    assert_equal(comes, stays)


def test_a_step_that_is_skipped_leaves_no_update(tmp_path: Path) -> None:
    """Of two steps the loss is NaN: one in the middle, and the last."""
    runs = []
    for name, options in (("stays", STAYS), ("comes", COMES)):
        trainer = made(tmp_path / name, **options, on_nonfinite_loss="skip", logging_nan_inf_filter=False)
        _poison(trainer, {2, 5})
        trainer.train()
        runs.append(trainer)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert [index for index, loss in enumerate(losses) if loss != loss] == [2, 5]
    assert all(torch.equal(one, weights(runs[0])[name]) for name, one in weights(runs[1]).items())


def test_a_training_that_stops_at_a_loss_has_the_updates_before(tmp_path: Path) -> None:
    runs = [
        made(tmp_path / name, **options, on_nonfinite_loss="stop") for name, options in (("s", STAYS), ("c", COMES))
    ]
    for trainer in runs:
        _poison(trainer, {3})
        with pytest.raises(NonFiniteError, match=r"^step 4: the loss is nan"):
            trainer.train()
    assert all(torch.equal(one, weights(runs[0])[name]) for name, one in weights(runs[1]).items())


def _poison(trainer: PipelineTrainer, steps: set[int]) -> None:
    """Make the losses of some steps, counted from 0, NaN."""
    head = trainer.pipe.stages[max(trainer.pipe.stages)]
    forward, of_step = head.forward, trainer.pipe.steps

    def poisoned(context: Any, **given: Any) -> Any:
        found = forward(context, **given)
        return {n: v * float("nan") for n, v in found.items()} if of_step.step in steps else found

    head.forward = poisoned  # type: ignore[method-assign]


def test_an_update_that_fails_ends_the_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the step of the update, which is the step before."""
    step_stage, failed = optim.step_stage, []

    def fail(trainer: Any, stage: int, options: Any = None) -> None:
        if options is not None and stage == 2 and trainer.state.global_step == 3:
            failed.append(stage)
            raise KeyError("the cause")
        step_stage(trainer, stage, options)

    monkeypatch.setattr(optim, "step_stage", fail)
    trainer = made(tmp_path, **COMES)
    with pytest.raises(StageError, match=r"stage 2, update of step 3: KeyError: 'the cause'"):
        trainer.train()
    assert failed == [2]
    weights(trainer)
    assert failed == [2], "it is not tried again"


def test_a_step_that_fails_leaves_the_updates_before_it(tmp_path: Path) -> None:
    """Whoever goes on with the weights has those of the last step."""
    runs = []
    for name, options in (("stays", STAYS), ("comes", COMES)):
        trainer = made(tmp_path / name, **options)
        first = trainer.pipe.stages[0]
        forward = first.forward

        def fail(context: Any, forward: Any = forward, trainer: Any = trainer, **given: Any) -> Any:
            if trainer.pipe.step == 3:
                raise ValueError("no memory")
            return forward(context, **given)

        first.forward = fail  # type: ignore[method-assign]
        with pytest.raises(StageError, match="no memory"):
            trainer.train()
        runs.append(weights(trainer))
    assert all(torch.equal(one, runs[0][name]) for name, one in runs[1].items())


def in_processes(folder: str) -> list[tuple[dict[str, torch.Tensor], list[tuple[Any, ...]]]]:
    common = {"num_stages": 6}
    runs = {"stays": STAYS, "comes": COMES, "stays, no clipping": STAYS, "comes, no clipping": COMES}
    return [
        numbers(trained(Path(folder) / name, **options | common | {"max_grad_norm": 0.05 * ("no" not in name)}))
        for name, options in runs.items()
    ]


def test_in_two_processes(tmp_path: Path) -> None:
    for runs in run_gloo(in_processes, 2, str(tmp_path)):
        for found, expected in ((runs[1], runs[0]), (runs[3], runs[2])):
            assert found[1][:-1] == expected[1][:-1]
            assert all(torch.equal(one, expected[0][name]) for name, one in found[0].items())


def test_float16(tmp_path: Path) -> None:
    """The first scale overflows; its steps are skipped, and later updates have the scale of their step."""
    for number, values in enumerate(({}, {"dtype": torch.float16, "fp32_master_weights": True})):
        runs = [
            trained(tmp_path / f"{name} {number}", **options, **values, fp16=True, max_steps=8, learning_rate=1e-3)
            for name, options in (("stays", STAYS), ("comes", COMES))
        ]
        assert runs[0].scaler is not None
        assert runs[1].scaler == runs[0].scaler
        assert_equal(runs[1], runs[0])


def test_a_method_that_an_instance_has_is_called_in_the_middle_of_an_update() -> None:
    callback = TrainerCallback()
    assert not [*callbacks_of_update([callback])]
    vars(callback)["on_optimizer_step"] = lambda *args, **kwargs: None
    assert [*callbacks_of_update([callback])] == [(callback, "on_optimizer_step")]
