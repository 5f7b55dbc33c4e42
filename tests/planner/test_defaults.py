"""What is not given: planned wherever the shape of a mini-batch is known, by data sheets; else plain values."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from hf_gpipe import Pipeline, PipelineTrainingArguments
from hf_gpipe.commands.plan import main
from hf_gpipe.errors import UserError
from hf_gpipe.job.facts import DeviceFacts
from hf_gpipe.job.job import Job
from hf_gpipe.partition.cluster import Cluster, Level
from hf_gpipe.planner import decide
from hf_gpipe.planner.costs import measure
from hf_gpipe.planner.costs.measure import rated_machine, steady_memory
from hf_gpipe.planner.machines.devices import DEVICES, LINKS, cpu, like_gpu
from hf_gpipe.planner.machines.links import steady
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe import TrainingSection
from hf_gpipe.settings.pipeline import PLANNED, PipelineConfig
from hf_gpipe.settings.section import keys_of
from tests.gloo import run_gloo
from tests.oracle import padded_batch, tiny_config

GIB = 1 << 30
LLAMA_8B = """\
model:
  config: {model_type: llama, hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, vocab_size: 128256,
    num_attention_heads: 32, num_key_value_heads: 8, max_position_embeddings: 8192, tie_word_embeddings: false}
  dtype: bfloat16
lora: {r: 16}
data: {kind: chat, path: never.jsonl, max_length: 2048}
pipeline: {num_stages: 2}
training: {output_dir: never, batch_size: 32}
"""


def values(config: PipelineConfig) -> list[Any]:
    return [getattr(config, name) for name in PLANNED]


def test_a_recipe_without_these_keys_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LoRA on 8 billion parameters with one micro-batch asked for 336 GiB of each card of 24 GiB, and 31 s a step."""
    (tmp_path / "recipe.yaml").write_text(LLAMA_8B)
    options = [str(tmp_path / "recipe.yaml"), "--devices", "2", "--memory", "24GiB", "--device", "rtx4090", "--json"]
    assert main(options) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["peak_bytes"] < 24 * GIB
    assert plan["step_seconds"] == pytest.approx(19.5, abs=0.3)
    assert plan["settings"]["num_micro_batches"] > 1


@pytest.mark.parametrize(
    ("given", "expected", "unplanned"),
    [
        ({}, ["auto"] * 4, [1, "gpipe", "stage", "count"]),
        ({"num_micro_batches": 4, "recompute": "none"}, [4, "auto", "none", "auto"], [4, "gpipe", "none", "count"]),
        ({"schedule": "1f1b"}, ["auto", "1f1b", "auto", "auto"], [1, "1f1b", "stage", "count"]),
        ({"schedule": "pipedream"}, [1, "pipedream", "stage", "count"], [1, "pipedream", "stage", "count"]),
        ({"schedule": "mine.txt"}, [1, "mine.txt", "stage", "count"], [1, "mine.txt", "stage", "count"]),
        ({"schedule": "pipedream", "partition": "auto"}, *[[1, "pipedream", "stage", "auto"]] * 2),
    ],
)
def test_the_rule(given: dict[str, Any], expected: list[Any], unplanned: list[Any]) -> None:
    config = PipelineConfig(2, **given)
    assert not config.is_decided
    assert values(config.with_defaults(can_plan=True)) == expected
    assert values(config.with_defaults(can_plan=False)) == unplanned
    for can_plan in (True, False):
        settled = config.with_defaults(can_plan=can_plan)
        assert settled.with_defaults(can_plan=not can_plan) == settled, "what is settled stays"


def test_a_pipeline_plans_by_its_example_and_is_plain_without() -> None:
    config = tiny_config("llama")
    for plain in (Pipeline(config, 2, 5), Pipeline(config, config=PipelineConfig(2, 5))):
        assert plain.planned is None
        assert (plain.schedule_name, plain.recompute, plain.config.partition) == ("gpipe", "stage", (3, 3))
    planned = Pipeline(config, 2, 5, example=padded_batch(config))
    assert planned.planned is not None
    assert (planned.num_micro_batches, planned.recompute) == (5, "none")
    with pytest.raises(UserError, match=r"give values .* example="):
        Pipeline(config, 2, "auto")


def test_a_run_that_goes_on_keeps_its_micro_batches() -> None:
    for asked, expected in ((None, 3), ("auto", 3), (2, 2)):
        options: Any = {"schedule": "gpipe", "recompute": "stage", "partition": "count"}
        config = PipelineConfig(2, num_micro_batches=asked, **options).resumed(3)
        assert Pipeline(tiny_config("llama"), config=config, example=Workload(8, 8, 8)).num_micro_batches == expected
    assert Pipeline(tiny_config("llama"), config=PipelineConfig(2).resumed(3)).num_micro_batches == 3, "without a shape"


def test_nothing_is_timed_to_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two identical runs chose one micro-batch and two, because products and copies were timed on a busy machine."""
    config, example = tiny_config("llama"), Workload(4, 32, 32)

    def no_time(*_: Any) -> Any:
        raise AssertionError("it was timed")

    measure.this_machine.cache_clear()
    for name in ("_matrix_rate", "_memory_rate", "_call_seconds", "_loopback"):
        monkeypatch.setattr(measure, name, no_time)
    one, other = (Pipeline(config, 2, example=example) for _ in range(2))
    assert (one.config, one.planned) == (other.config, other.planned)
    with pytest.raises(AssertionError, match="it was timed"):
        Pipeline(config, 2, "auto", partition="profile", example=example)


@pytest.mark.parametrize(
    ("name", "memory_gib", "capability", "entry", "link"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.3, (8, 0), "a100-80", "nvlink3"),
        ("NVIDIA A100-PCIE-40GB", 39.4, (8, 0), "a100-40", "pcie4"),
        ("Tesla V100-SXM2-16GB", 15.8, (7, 0), "v100-16", "nvlink2"),
        ("Tesla V100-SXM3-32GB", 31.7, (7, 0), "v100-32", "nvlink2"),
        ("NVIDIA GeForce RTX 4090", 23.6, (8, 9), "rtx4090", "pcie4"),
        ("NVIDIA H200", 139.8, (9, 0), "h200", "nvlink4"),
        ("NVIDIA L4", 22.0, (8, 9), "l4", "pcie4"),
        ("NVIDIA L40S", 44.4, (8, 9), "l40s", "pcie4"),
        ("NVIDIA B200", 178.4, (10, 0), "b200", "nvlink5"),
        ("NVIDIA RTX 6000 Ada Generation", 47.5, (8, 9), "rtx6000-ada", "pcie4"),
        ("NVIDIA GB10", 121.7, (12, 1), "dgx-spark", "infiniband-200"),
        ("AMD Instinct MI300X", 191.7, (9, 4), "mi300x", "infinity-fabric"),
        # Others: of their generation.
        ("NVIDIA L40", 44.5, (8, 9), "l4", "pcie4"),
        ("NVIDIA A40", 44.4, (8, 6), "rtx3090", "pcie4"),
        ("NVIDIA GeForce RTX 2080 Ti", 10.7, (7, 5), "t4", "pcie4"),
        ("NVIDIA GB300", 277.0, (10, 3), "b200", "pcie4"),
        ("Tesla M40", 11.2, (5, 2), "p100", "pcie4"),
    ],
)
def test_the_data_sheet_of_a_gpu(
    name: str, memory_gib: float, capability: tuple[int, int], entry: str, link: str
) -> None:
    found = like_gpu(name, int(memory_gib * GIB), capability)
    assert (found.name, found.flops_per_second) == (entry, DEVICES[entry].flops_per_second)
    assert found.link == LINKS[link]


def test_the_device_that_is_decided_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rated_machine(torch.device("cpu"), 2)
    assert found.flops_per_second == cpu(torch.get_num_threads()).flops_per_second
    assert found.memory_bytes == measure.device_memory(DeviceFacts.of(torch.device("cpu")), 2)
    assert cpu(4).flops_for("float32") == 4 * cpu(1).flops_for("float32")
    gpu = torch.device("cuda", 5)
    free = [int(78.9 * GIB), int(78.2 * GIB), int(40.5 * GIB)]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    memory = []
    while free:
        memory.append(steady_memory(DeviceFacts.of(gpu)))
        del free[0]
    assert memory == [75 * GIB, 75 * GIB, 40 * GIB], "a little more or less that others hold changes nothing"


def _decided_slowly() -> list[Any]:
    best_plan = decide.best_plan

    def slow(*args: Any) -> Any:
        time.sleep(17)
        return best_plan(*args)

    decide.best_plan = slow
    Job.current().timeout = timedelta(seconds=15)
    config = tiny_config("llama")
    return values(Pipeline(config, 2, 2, example=padded_batch(config)).config)


def test_the_others_wait_for_a_planner_that_takes_longer_than_a_message_may() -> None:
    """While the main process planned for minutes, the others gave up after the time limit of a message."""
    one, other = run_gloo(_decided_slowly, 2)
    assert one == other


def test_measured_links_count_in_round_numbers() -> None:
    one, other = (
        Cluster((Level(2, rate, latency), Level(2, 1e8, 0.0))) for rate, latency in ((9.1e9, 4e-5), (8.2e9, 3e-5))
    )
    assert steady(one) == steady(other) != one
    assert steady(one).levels[0].bytes_per_second == 2.0**33


def test_recipes_and_trainers_have_the_same_defaults(tmp_path: Path) -> None:
    args = PipelineTrainingArguments(str(tmp_path), use_cpu=True)
    assert args.on_nonfinite_loss == keys_of(TrainingSection)["on_nonfinite_loss"].default == "ignore"
    assert (
        args.ddp_timeout
        == PipelineConfig().timeout_seconds
        == TrainingArguments.__dataclass_fields__["ddp_timeout"].default
    )
    assert args.config.not_given == PipelineConfig().not_given == list(PLANNED)
