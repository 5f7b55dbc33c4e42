"""The relative speeds of heterogeneous devices: measured in a run, and of data sheets in a plan."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from hf_gpipe import Pipeline
from hf_gpipe.adapters import adapter_for
from hf_gpipe.adapters.parts.ranks import ProcessRanks
from hf_gpipe.commands.plan import main
from hf_gpipe.errors import UserError
from hf_gpipe.job.facts import DeviceFacts
from hf_gpipe.partition.cluster import Level
from hf_gpipe.planner import decide
from hf_gpipe.planner.costs import measure
from hf_gpipe.planner.costs.layers import LayerTracer
from hf_gpipe.planner.costs.measure import block_seconds
from hf_gpipe.planner.costs.model_costs import ModelCosts, Seconds, mean_costs
from hf_gpipe.planner.costs.stage_costs import StageCosts
from hf_gpipe.planner.machines.devices import DEVICES, cpu
from hf_gpipe.planner.workload import Workload
from hf_gpipe.settings.division import Division
from tests.gloo import run_gloo
from tests.oracle import padded_batch, tiny_config

CPU = torch.device("cpu")
CONFIG = LlamaConfig(
    vocab_size=60, hidden_size=16, intermediate_size=64, num_hidden_layers=7, num_attention_heads=2, pad_token_id=0
)


KINDS = ("profile", "heterogeneous GPUs", "by count", "alike")
_Trained = tuple[object, tuple[int, ...], float, list[str]]


def _train_each() -> list[_Trained]:
    return [_train(kind) for kind in KINDS]


def _train(kind: str) -> _Trained:
    """Speeds, partition and loss of a pipeline whose second process is half as fast, and what was said."""
    said: list[str] = []
    rank = torch.distributed.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "block_seconds", lambda *_, **__: [1.0, 2.03][rank])
        patch.setattr(decide.logger, "warning", said.append)
        if kind == "heterogeneous GPUs":
            facts = DeviceFacts("cpu", 1 << 30, 1 << 30, model=["a fast GPU", "a slow GPU"][rank])
            patch.setattr(DeviceFacts, "of", classmethod(lambda cls, device: facts))
        batch = padded_batch(CONFIG, rows=8)
        given = {"profile": {"speeds": "profile"}, "by count": {"speeds": "profile", "partition": "count"}}
        decided = {"num_micro_batches": 4, "schedule": "1f1b", "recompute": "none"}
        pipe = Pipeline(CONFIG, 2, example=batch, **{"partition": "auto", **decided, **given.get(kind, {})})
        loss = float(pipe.train_step(batch))
    return pipe.config.speeds, pipe.config.partition, loss, said


def test_a_slower_process_gets_fewer_layers_and_the_loss_is_the_same() -> None:
    expected = float(Pipeline(CONFIG, 1, 4).train_step(padded_batch(CONFIG, rows=8)))
    for kind, (found, partition, loss, said), (others, *_) in zip(KINDS, *run_gloo(_train_each, 2), strict=True):
        assert found == others == (None if kind == "alike" else (1.0, 0.5)), kind
        if kind in ("profile", "heterogeneous GPUs"):
            assert partition[0] > partition[1] + 1
            assert "pipeline.speeds=[1.0, 0.5]" in said[0]
        assert loss == pytest.approx(expected, rel=1e-6), kind


def test_speeds_are_rounded_and_relative_to_the_first_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Four:
        """Stands for the world of four processes."""

        device = CPU

        def barrier(self) -> None: ...

        def gather_objects(self, own: float) -> list[float]:
            return [own, 2 * own, own, own / 3]

    monkeypatch.setattr(measure, "block_seconds", lambda *_, **__: 0.7)
    assert measure.measure_speeds(None, None, Four(), None) == (1.0, 0.5, 1.0, 3.08)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "marian"])
def test_the_time_of_a_block_takes_no_random_numbers(family: str) -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    assert 0 < block_seconds(adapter_for(tiny_config(family)), Workload(2, 12, 12), CPU) < 30
    assert torch.equal(torch.rand(3), expected)


def _of_blocks(size: int) -> tuple[ModelCosts, float]:
    """The measurements of this process, of layers that are divided among all processes."""
    group = torch.distributed.group.WORLD
    assert group is not None
    ranks = ProcessRanks(Division(size), torch.distributed.get_rank(), group, CPU)
    adapter, workload = adapter_for(CONFIG), Workload(2, 12, 12)
    costs = measure.profile_layers(adapter, workload, CPU, repeats=2, ranks=ranks)
    return costs, block_seconds(adapter, workload, CPU, ranks=ranks)


def test_divided_layers_are_measured_with_the_sums_over_their_ranks() -> None:
    for costs, block in run_gloo(_of_blocks, 2, 2):
        assert costs.is_measured
        assert costs.layers[1].forward.sums.size == 2
        assert block > 0
        assert costs.layers[1].forward.sums.num_bytes > 0
        # A link that takes seconds for a byte changes nothing: its time is in what was measured.
        slow = StageCosts(costs, cpu(1), Level(2, 1.0, 1.0))
        assert slow.seconds(1, 2, "none") == StageCosts(costs, cpu(1)).seconds(1, 2, "none")


def test_a_block_that_takes_longer_has_more_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, run = adapter_for(CONFIG), measure.Stage.forward
    fast = block_seconds(adapter, Workload(2, 12, 12), CPU)
    monkeypatch.setattr(measure.Stage, "forward", lambda *a, **k: (time.sleep(0.2), run(*a, **k))[1])
    assert block_seconds(adapter, Workload(2, 12, 12), CPU) > fast + 0.15


def test_costs_of_a_slower_process_count_as_the_first_one_s() -> None:
    costs = measure.profile_layers(adapter_for(CONFIG), Workload(1, 8, 8), CPU, repeats=1)
    half = mean_costs([costs], [0.5])
    for one, other in zip(costs.layers, half.layers, strict=True):
        assert one.seconds is not None
        assert other.seconds == Seconds(*(value / 2 for value in one.seconds))
    assert mean_costs([LayerTracer(adapter_for(CONFIG)).costs(Workload(1, 8, 8))], [3.0]).layers[0].seconds is None


RECIPE = """\
model:
  config: {model_type: llama, hidden_size: 512, intermediate_size: 2048, num_hidden_layers: 9, num_attention_heads: 8}
data: {kind: cldr, languages: [de], max_source_tokens: 256, max_target_tokens: 256}
tokenizer: {vocab_size: 500}
pipeline: {num_micro_batches: 8, schedule: 1f1b, recompute: none, speeds: profile}
training: {output_dir: never, batch_size: 64}
"""


def test_a_plan_for_heterogeneous_cards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    assert main([str(path), "--device", "h100,t4"]) == 0
    out = capsys.readouterr().out
    memory = DEVICES["t4"].memory_bytes
    assert memory is not None
    assert f"devices (h100, t4), 78.2 GiB, {memory / 2**30:.3g} GiB, relative speeds 1, 0." in out
    counts = out.split("layers a stage [")[1].split("]")[0].split(", ")
    assert int(counts[0]) > 2 * int(counts[1])
    for options, words in (
        (["--device", "h100,t4", "--devices", "3"], "--device names 2 devices and --devices is 3"),
        (["--device", "h100,t4", "--profile"], "--profile measures"),
        (["--device", "h100,x4"], "the device 'x4' is unknown"),
    ):
        assert main([str(path), *options]) == 2
        assert words in capsys.readouterr().err

    assert main([str(path), "--devices", "2"]) == 0
    assert "pipeline.speeds is profile: a run measures them" in capsys.readouterr().err


def test_of_divided_layers_the_slowest_card_of_a_stage_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace(", speeds: profile", ""))
    given = [str(path), "--device", "h100,h100,t4,h100", "pipeline.tensor_parallel=2", "pipeline.num_stages=2"]
    assert main(given) == 0
    assert "78.2 GiB, 14 GiB, relative speeds 1, 0." in " ".join(capsys.readouterr().out.split())
    assert main([*given[:1], "--device", "h100", "--devices", "4", *given[3:], "--profile"]) == 2
    assert "tensor_parallel is 2, and the seconds of divided layers" in capsys.readouterr().err


def test_other_words_for_speeds_are_an_error() -> None:
    with pytest.raises(UserError, match="speeds"):
        Pipeline(CONFIG, 2, 4, speeds="fast")
