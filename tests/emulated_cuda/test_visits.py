"""Weights that visit emulated devices: the numbers of those that stay, little memory, and no wait of the host."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from hf_gpipe import Pipeline
from hf_gpipe.errors import StageError
from hf_gpipe.modes.visits import weights as visits
from hf_gpipe.modes.visits.table import most_loaded
from hf_gpipe.modes.visits.visit import DROP
from hf_gpipe.modes.visits.weights import VisitingWeights
from hf_gpipe.training import updates
from tests.emulated_cuda.comparing import assert_near, gathered
from tests.emulated_cuda.device import counting
from tests.emulated_cuda.happens_before import checking
from tests.emulated_cuda.models import config_of
from tests.emulated_cuda.mutants import mutate
from tests.emulated_cuda.processes import on_emulated_cuda
from tests.oracle import padded_batch, plain_model, visits_of
from tests.training.toy import trainer

Numbers = tuple[list[float], dict[str, torch.Tensor]]


def pipeline(family: str, device: Any, *, dropout: float = 0.0, tied: bool = True, **options: Any) -> Pipeline:
    config = config_of(family, dropout=dropout, tied=tied)
    peft = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=dropout)
    torch.manual_seed(0)
    given = {"num_micro_batches": 2, "schedule": "breadth_first", "recompute": "stage"} | options
    return Pipeline(plain_model(config), device=device, peft_config=peft, **given)


def numbers(pipe: Pipeline) -> Numbers:
    """The losses of two steps with AdamW and of an evaluation, and the adapters after them."""
    batch = padded_batch(pipe.adapter.config) if pipe.world.rank == 0 else None
    trained = [p for p in pipe.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained}], lr=1e-2)
    losses = []
    for _ in range(2):
        losses.append(float(pipe.train_step(batch)))
        pipe.clip_grad_norm_(0.5)
        optimizer.step()
        pipe.zero_grad()
    losses.append(pipe.eval_step(batch).loss)
    return losses, gathered(pipe, {n: p for n, p in pipe.named_parameters() if p.requires_grad})


def assert_equal(found: Numbers, expected: Numbers) -> None:
    assert found[0] == expected[0]
    assert_near(found[1], expected[1], 0.0, "adapter")


@pytest.mark.parametrize(
    ("family", "tied", "device", "options"),
    [
        ("llama", True, "cuda:0", {"num_stages": 5}),
        ("llama", False, "cuda:1", {"num_stages": 4, "schedule": "gpipe"}),
        ("llama", True, "cuda:0", {"num_stages": 4, "sequence_chunks": 3}),
        ("llama", True, ["cuda:0", "cuda:1"], {"num_stages": 6}),
        ("marian", True, "cuda:0", {"num_stages": 6}),
        ("t5", True, "cuda:0", {"num_stages": 6}),
        ("llama", True, "cuda:0", {"num_stages": 6, "resident_stages": 3}),
        ("t5", True, "cuda:0", {"num_stages": 6, "resident_stages": 2}),
        ("llama", True, "cuda:0", {"num_stages": 5, "offload_pinned": False}),
    ],
)
@on_emulated_cuda()
def test_the_numbers_of_weights_that_stay(family: str, tied: bool, device: Any, options: dict[str, Any]) -> None:
    given = copy.deepcopy(options) | {"resident_stages": 0, "offload_pinned": True}
    stays = pipeline(family, device, dropout=0.2, tied=tied, **given)
    comes = pipeline(family, device, dropout=0.2, tied=tied, **options, offload_weights="frozen")
    homes = [p.data for p in comes.parameters() if not p.requires_grad]
    assert any(home.device.type == "cpu" for home in homes)
    assert all(home.is_pinned() == options.get("offload_pinned", True) for home in homes if home.device.type == "cpu")
    assert any(home.device.type == "cuda" for home in homes) == ("resident_stages" in options)
    assert_equal(numbers(comes), numbers(stays))


def trained(family: str, device: Any, offload_weights: str | None, *, tied: bool, **options: Any) -> Numbers:
    """`numbers` of all weights."""
    config = config_of(family, dropout=0.2, tied=tied)
    given = {"num_micro_batches": 2, "schedule": "breadth_first", "recompute": "stage"} | options
    pipe = Pipeline(plain_model(config), device=device, offload_weights=offload_weights, **given)
    hosted = [p for p in pipe.parameters() if p.device.type == "cpu"]
    assert bool(hosted) == (offload_weights is not None)
    pipe.train_step(padded_batch(config) if pipe.world.rank == 0 else None)  # whose gradients are added to
    found = numbers(pipe)
    assert all(p.device.type == "cpu" for p in hosted)
    return found


@pytest.mark.parametrize(
    ("family", "tied", "device", "options"),
    [
        ("llama", True, "cuda:0", {"num_stages": 5}),
        ("llama", False, ["cuda:0", "cuda:1"], {"num_stages": 6}),
        ("t5", True, "cuda:0", {"num_stages": 6}),
        ("llama", True, "cuda:0", {"num_stages": 5, "resident_stages": 2, "offload_pinned": False}),
    ],
)
@on_emulated_cuda()
def test_trained_weights_visit_too(family: str, tied: bool, device: Any, options: dict[str, Any]) -> None:
    stays = trained(
        family, device, None, tied=tied, **copy.deepcopy(options) | {"resident_stages": 0, "offload_pinned": True}
    )
    comes = trained(family, device, "all", tied=tied, **options)
    # The host sums squares, and updates, in another order than a device.
    assert comes[0] == pytest.approx(stays[0], rel=1e-12)
    assert_near(comes[1], stays[1], 1e-12, "weight")


def dealt(device: Any, **options: Any) -> Pipeline:
    """The slots of two rounds are dealt to the devices, so gradients of a stage go from one to the other."""
    given = {"num_stages": 5, "num_micro_batches": 4, "schedule": "round_robin", "offload_weights": "all"} | options
    return Pipeline(plain_model(config_of("llama", dropout=0.2, tied=False)), seed=3, device=device, **given)


def gradients_of(pipe: Pipeline) -> dict[str, torch.Tensor]:
    """Of two steps, the second with weights that have changed, and once more without."""
    batch, found = padded_batch(pipe.adapter.config), {}
    for step in range(3):
        found[f"loss {step}"] = pipe.train_step(batch).cpu()
        for name, parameter in pipe.named_parameters():
            assert parameter.grad is not None
            found[f"{name} {step}"] = parameter.grad.cpu().clone()
            if not step:
                parameter.data -= 0.1 * parameter.grad
                parameter.grad = None
    return found


@on_emulated_cuda()
def test_shared_stages_have_the_numbers_of_stages_that_stay() -> None:
    expected = gradients_of(dealt("cuda:0", schedule="breadth_first", offload_weights=None))
    pipe = dealt(["cuda:0", "cuda:1"])
    table = pipe.schedule(4)
    assert table.placement.is_shared
    assert len(table.actions) == 2
    assert any(source.kind == DROP for one in table.actions[1] for source in table.sources(one))
    assert_near(gradients_of(pipe), expected, 0.0, "number")
    # A device has the weights of two slots.
    for worker, most in enumerate(most_loaded(table)):
        visits = visits_of(pipe)[worker]
        (buffers,) = visits._free.values()
        assert len(buffers) == most
        assert {buffer.memory.nbytes for buffer in buffers} == {max(visits.hosted_bytes.values())}


@on_emulated_cuda()
def test_shared_stages_are_updated_beside_backwards() -> None:
    """Once their gradients have left the devices, which the thread waits for."""

    def weights(device: Any, *, is_beside: bool, **options: Any) -> Numbers:
        pipe, losses = dealt(device, **options), []
        batch = padded_batch(pipe.adapter.config)

        def update(stage: int | None = None) -> None:
            names = None if stage is None else pipe.weights.names_of(stage)
            for name, parameter in pipe.named_parameters():
                if parameter.grad is not None and (names is None or name in names):
                    parameter.data -= 0.1 * parameter.grad

        for _ in range(2):
            if is_beside:
                losses.append(float(pipe.train_ahead([batch], None, lambda: None, update)()[0]))
            else:
                losses.append(float(pipe.train_step(batch, update=lambda *_: update())))
            pipe.zero_grad()
        return losses, {name: p.detach().cpu().clone() for name, p in pipe.named_parameters()}

    expected = weights("cuda:0", is_beside=False, schedule="breadth_first", offload_weights=None)
    found = weights(["cuda:0", "cuda:1"], is_beside=True)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert_near(found[1], expected[1], 0.0, "weight")


@pytest.mark.parametrize("schedule", ["breadth_first", "round_robin"])
@on_emulated_cuda(2)
def test_trained_weights_in_two_processes(schedule: str) -> None:
    """Of dealt stages a process says that gradients are at home while its device goes on."""
    options: dict[str, Any] = {"num_stages": 6, "num_processes": 2, "num_micro_batches": 4}
    stays = trained("llama", "cuda", None, tied=True, **options)
    comes = trained("llama", "cuda", "all", tied=True, **options, schedule=schedule)
    assert comes[0] == pytest.approx(stays[0], rel=1e-12)
    assert_near(comes[1], stays[1], 1e-12, "weight")


@on_emulated_cuda(2)
def test_in_two_processes_with_nccl() -> None:
    """With copies of a tied weight that never changes, which no message must carry."""
    options: dict[str, Any] = {"num_stages": 6, "num_processes": 2}
    stays = numbers(pipeline("llama", "cuda", dropout=0.2, **options))
    assert_equal(numbers(pipeline("llama", "cuda", dropout=0.2, **options, offload_weights="frozen")), stays)


@on_emulated_cuda()
def test_frozen_weights_of_a_gpu_stay_in_the_checkpoint_s_files(tmp_path: Path) -> None:
    config = config_of("llama", tied=False)
    plain_model(config).save_pretrained(tmp_path)
    peft = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    given = {"num_micro_batches": 2, "schedule": "breadth_first", "recompute": "stage", "peft_config": peft}

    def made(**options: Any) -> Pipeline:
        torch.manual_seed(0)
        return Pipeline(str(tmp_path), 5, device="cuda:0", dtype="auto", **copy.deepcopy(given), **options)

    pipe = made(offload_weights="frozen", offload_pinned=False)
    frozen = [p for p in pipe.parameters() if not p.requires_grad]
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    mapped = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
    assert frozen
    assert all(any(low <= p.data_ptr() < high for low, high in mapped) for p in frozen)
    assert_equal(numbers(pipe), numbers(made()))


@on_emulated_cuda()
def test_a_copy_of_pageable_memory_does_not_keep_the_device_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process waits for such a copy, and began it before it had given the device the actions to run meanwhile."""
    events: list[str] = []
    enter, copies = VisitingWeights.enter, visits._copy

    def entering(self: Any, stage: int, **options: Any) -> None:
        enter(self, stage, **options)
        events.append(f"run {stage}")

    def copying(*tensors: Any) -> None:
        events.append("copy")
        copies(*tensors)

    monkeypatch.setattr(VisitingWeights, "enter", entering)
    monkeypatch.setattr(visits, "_copy", copying)
    for is_pinned, first in ((True, ["copy", "copy", "run 0", "run 0"]), (False, ["copy", "run 0", "run 0", "copy"])):
        pipe = pipeline("llama", "cuda:0", num_stages=5, offload_weights="frozen", offload_pinned=is_pinned)
        events.clear()
        pipe.train_step(padded_batch(pipe.adapter.config))
        assert events[: len(first)] == first


@on_emulated_cuda()
def test_a_device_has_two_stages_and_the_graphs_of_one_run() -> None:
    peaks = {}
    for visit in (False, True, 2):
        before = torch.cuda.memory_allocated("cuda:0")
        visitors = "frozen" if visit else None
        stay = 2 * (visit == 2)
        pipe = pipeline("llama", "cuda:0", tied=False, num_stages=5, offload_weights=visitors, resident_stages=stay)
        batch = padded_batch(pipe.adapter.config)
        pipe.train_step(batch)
        torch.cuda.reset_peak_memory_stats("cuda:0")
        pipe.train_step(batch)
        peaks[visit] = torch.cuda.max_memory_allocated("cuda:0") - before
        weights = sum(p.nbytes for p in pipe.parameters() if not p.requires_grad)
        largest = max((n for own in visits_of(pipe).values() for n in own.hosted_bytes.values()), default=0)
        del pipe
    # Nothing else differs: all recompute, and the last stage keeps one graph.
    assert peaks[True] <= peaks[False] - weights + 2 * largest
    assert peaks[True] < peaks[2] <= peaks[True] + 2 * largest, "two stages stay"


@on_emulated_cuda()
def test_a_device_has_two_slots_of_shared_stages_and_one_graph() -> None:
    peaks, devices = {}, ["cuda:0", "cuda:1"]
    for is_shared in (False, True):
        before = [torch.cuda.memory_allocated(device) for device in devices]
        # In both a graph is made by recomputing and used up, or is the last stage's; the rest is inputs.
        stays: dict[str, Any] = {"schedule": "breadth_first", "recompute": "stage", "offload_weights": None}
        pipe = dealt(devices if is_shared else "cuda:0", num_stages=6, **({} if is_shared else stays))
        batch = padded_batch(pipe.adapter.config)
        pipe.train_step(batch)
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        pipe.train_step(batch)
        peaks[is_shared] = [torch.cuda.max_memory_allocated(one) - of for one, of in zip(devices, before, strict=True)]
        weights = sum(p.nbytes for p in pipe.parameters())
        visits = [*visits_of(pipe).values()]
        most = most_loaded(pipe.schedule(4)) if is_shared else []
        largest = max((n for own in visits for n in own.hosted_bytes.values()), default=0)
        del pipe, visits
    for peak, count in zip(peaks[True], most, strict=True):
        # Gradients are as large as weights. There are those of the stage at work, and of the one that leaves.
        most_bytes = peaks[False][0] - 2 * weights + (count + 2) * largest
        assert peak <= most_bytes < peaks[False][0]


@on_emulated_cuda()
def test_the_host_waits_once_in_a_step() -> None:
    pipe = pipeline("llama", ["cuda:0", "cuda:1"], tied=False, num_stages=6, offload_weights="frozen")
    batch = padded_batch(pipe.adapter.config)
    for _ in range(2):
        with counting() as counts:
            pipe.train_step(batch)
    assert len(counts.synchronisations) <= 1, str(counts)
    assert not counts.pageable_copies, str(counts)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},
        {"offload_pinned": False},
        {"resident_stages": 2, "fp32_master_weights": True},
        {"fp16": True},
    ],
)
@on_emulated_cuda()
def test_updates_beside_forwards(tmp_path: Path, options: dict[str, Any]) -> None:
    """To the last bit those of updates at the end of a step; a thread loads a stage whose L has come before its A."""
    loads: list[bool] = []
    load = VisitingWeights.load

    def noted(self: VisitingWeights, stage: int) -> None:
        loads.append(threading.current_thread() is threading.main_thread())
        load(self, stage)

    VisitingWeights.load = noted  # type: ignore[method-assign]
    found = []
    for name in ("late", "last"):
        loads.clear()
        dtype = torch.bfloat16 if "fp32_master_weights" in options else torch.float32
        made = trainer(
            tmp_path / name,
            model=plain_model(config_of("llama"), dtype=dtype),
            **{"family": "llama", "use_cpu": False, "num_stages": 6, "max_steps": 4, "max_grad_norm": 0.05},
            **{"schedule": "breadth_first", "offload_weights": "all"} | options,
        )
        made.train()
        found.append(({n: p.detach().clone() for n, p in made.pipe.named_parameters()}, made.state.log_history[:-1]))
        assert (False in loads) == (name == "late")
        updates._updates_stages_alone = lambda _: False
    kept = [
        [(entry["loss"], entry["grad_norm"], entry["learning_rate"]) for entry in log if "loss" in entry]
        for _, log in found
    ]
    assert kept[0] == kept[1]
    assert all(torch.equal(tensor, found[1][0][name]) for name, tensor in found[0][0].items())


@pytest.mark.parametrize("fp32_master_weights", [False, True])
@on_emulated_cuda()
def test_a_training_with_its_checkpoints(tmp_path: Path, fp32_master_weights: bool) -> None:
    """They are the same, so a run may go on with visits and without."""
    dtype = torch.bfloat16 if fp32_master_weights else torch.float32
    common: dict[str, Any] = {"family": "llama", "use_cpu": False, "max_steps": 4, "save_strategy": "steps"}
    common |= {"save_steps": 2, "num_stages": 5, "fp32_master_weights": fp32_master_weights}

    def weights(folder: str, resumed: str | None = None, **values: Any) -> dict[str, torch.Tensor]:
        model = plain_model(config_of("llama"), dtype=dtype)
        made = trainer(tmp_path / folder, model=model, **common | values)
        made.train(resume_from_checkpoint=resumed and str(tmp_path / resumed / "checkpoint-2"))
        made.save_model(str(tmp_path / folder / "saved"))
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / folder / "saved", dtype=dtype).state_dict()
        assert all(torch.equal(saved[n], p.detach().cpu()) for n, p in made.pipe.named_parameters())
        return saved

    comes: dict[str, Any] = {"schedule": "breadth_first", "offload_weights": "all"}
    expected = weights("stays")
    for found in (
        *(weights("comes", **comes), weights("comes again", "comes", **comes)),
        *(weights("comes then", "stays", **comes), weights("stays then", "comes")),
    ):
        assert_near(found, expected, 1e-2 if fp32_master_weights else 1e-6, "weight")


def problems_of_steps(visitors: str = "frozen") -> list[str]:
    with checking() as (checker, _):
        if visitors == "dealt":
            pipe = dealt(["cuda:0", "cuda:1"])
        else:
            pipe = pipeline("llama", "cuda:0", tied=True, num_stages=5, offload_weights=visitors)
        for _ in range(2):
            pipe.train_step(padded_batch(pipe.adapter.config))
            pipe.zero_grad()
    return list(checker.problems)


@on_emulated_cuda()
def test_streams_wait_for_each_other() -> None:
    assert not problems_of_steps()
    assert not problems_of_steps("all")
    assert not problems_of_steps("dealt")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("torch.cuda.current_stream(self._devices[stage]).wait_event(loaded.is_copied)", "is not ordered after"),
        ("stream.wait_event(loaded.buffer.is_free)", "copy_.default is not ordered after"),
        ("stream.wait_event(computed)", "copy_.default is not ordered after"),
        (
            "torch.cuda.current_stream(device).wait_event(has_left)",
            "memory is freed while aten.copy_.default may still",
        ),
    ],
)
@on_emulated_cuda()
def test_a_wait_less(line: str, problem: str) -> None:
    mutate(VisitingWeights, line, "pass")
    found = problems_of_steps("all")
    assert any(problem in one for one in found), found


@on_emulated_cuda()
def test_a_wait_less_of_shared_stages() -> None:
    expected = gradients_of(dealt(["cuda:0", "cuda:1"]))
    mutate(VisitingWeights, "stream.wait_event(given)", "pass")
    # Else the other device has waited for the copy before it sends its next message, and so has this one.
    visits.VisitingWeights._let_go = lambda self, device: self._leaving.pop(device, None)  # type: ignore[method-assign]
    # Gradients that have not come home have no meaning there.
    with pytest.raises(Exception, match=r"number|pinned memory was written before its copy"):
        assert_near(gradients_of(dealt(["cuda:0", "cuda:1"])), expected, 0.0, "number")


@on_emulated_cuda()
def test_gradients_of_earlier_visits_are_waited_for() -> None:
    mutate(VisitingWeights, "torch.cuda.current_stream(device).wait_stream(stream)", "pass")
    try:
        problems = problems_of_steps("dealt")
    except StageError as error:  # the emulated device saw the write itself
        problems = [str(error)]
    assert any("is not ordered after" in one or "was written before its copy" in one for one in problems)
