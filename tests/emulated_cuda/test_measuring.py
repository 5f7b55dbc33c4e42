"""Times, memory and the planner on emulated devices, and choices of devices that are refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_gpipe import Pipeline
from hf_gpipe.adapters import adapter_for
from hf_gpipe.adapters.peft_resolve import resolve_peft
from hf_gpipe.commands import train
from hf_gpipe.errors import RecipeError, UserError
from hf_gpipe.planner.costs import measure
from hf_gpipe.planner.workload import Workload
from hf_gpipe.runtime.memory import peak_memory_bytes
from hf_gpipe.settings.pipeline import PipelineConfig
from tests.emulated_cuda.comparing import measure_little
from tests.emulated_cuda.models import config_of
from tests.emulated_cuda.processes import on_emulated_cuda, run_emulated
from tests.oracle import plain_model
from tests.test_execution import decisions, measured
from tests.test_peft import lora
from tests.training.toy import trainer


def test_a_measured_step_tells_where_the_time_goes() -> None:
    for times, table in run_emulated(measured, 2):
        assert [one.action for one in times] == table
        for before, after in pairwise(times):
            assert before.end <= after.start
        for one in times:
            assert min(one.waiting, one.sending) >= 0
            assert one.start < one.end


def test_the_planner_decides_the_same_in_every_process() -> None:
    first, second = run_emulated(planned, 2)
    assert first == second


def planned() -> list[object]:
    measure_little()
    assert measure.this_machine(torch.device("cuda:1")).name == "emulated CUDA device"
    return decisions()


@on_emulated_cuda()
def test_layers_and_an_update_are_measured_with_new_lora_weights() -> None:
    adapter = adapter_for(config_of("llama"))
    resolve_peft(adapter, "default", lora())
    costs = measure.profile_layers(
        adapter, Workload(2, 8, 8), torch.device("cuda:1"), repeats=1, make_optimizer=torch.optim.SGD
    )
    assert costs.is_measured
    assert (costs.update_seconds_per_parameter or 0) > 0


@on_emulated_cuda()
def test_memory_is_that_of_the_fullest_device() -> None:
    devices = [torch.device("cuda:0"), torch.device("cuda:1")]
    kept = torch.zeros(1 << 20, device="cuda:1")
    assert peak_memory_bytes(devices) == torch.cuda.max_memory_allocated("cuda:1") == kept.nbytes
    measure_little()
    free = torch.cuda.mem_get_info("cuda:1")[0] + kept.nbytes
    machine = measure.this_machine(devices[1])
    assert machine.memory_bytes == free - measure._KERNELS_BYTES
    assert machine.host.link.bytes_per_second > 0
    assert machine.host.bytes_per_second >= machine.host.process_bytes_per_second > 0


@on_emulated_cuda()
def test_the_trainer_empties_the_cache(tmp_path: Path) -> None:
    emptied: list[int] = []
    torch.cuda.empty_cache = lambda: emptied.append(made.state.global_step)
    pipe = Pipeline(plain_model(config_of("marian"), dtype=torch.float32), 2, 2, device="cuda:1")
    options: dict[str, Any] = {"max_steps": 4, "save_strategy": "no", "torch_empty_cache_steps": 2, "use_cpu": False}
    made = trainer(tmp_path, model=pipe, **options)
    assert made.args.n_gpu == 1
    made.train()
    assert emptied == [0, 2], "as transformers does"


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cuda:0", "cuda:0"], "would share one GPU: cuda:0 of process 1"),
        (["cuda:0", "cuda:9"], "device 'cuda:9' was asked for and torch finds 8 CUDA devices"),
        (["cuda:0", "cpu"], "process 1 on cpu and process 0 on cuda"),
        (["cuda:0", "gpu"], "device 'gpu' is not one of torch's; use cpu or cuda"),
    ],
)
def test_devices_that_two_processes_cannot_have(devices: list[str], message: str) -> None:
    for found in run_emulated(refusal, 2, devices):
        assert message in found


def refusal(devices: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        Pipeline(config_of("llama"), 2, device=devices)
    return str(caught.value)


@on_emulated_cuda()
def test_the_train_command_starts_a_process_for_each_gpu() -> None:
    def started(**values: Any) -> int:
        recipe: Any = SimpleNamespace(pipeline=PipelineConfig(**values))
        return train._num_workers(recipe)

    assert started(num_stages=3) == 3
    assert started(num_stages=12) == 8
    assert started(num_stages=12, device="cpu") == 12
    assert started(num_stages=4, devices=("cuda:0", "cuda:1")) == 2
    with pytest.raises(RecipeError, match="num_processes is 9 and this machine has 8 GPUs"):
        started(num_stages=9, num_processes=9)
