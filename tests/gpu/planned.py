"""The planner's prediction of the memory and the time of a step beside what a GPU does."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from statistics import median
from typing import Any

import psutil
import torch
from bench.models import llama
from bench.planned import Case, planned, profile, tiny, train_pipeline
from bench.work import Work
from transformers import AutoModelForCausalLM

from hf_gpipe.errors import StageError
from hf_gpipe.planner.costs import measure
from hf_gpipe.planner.plan import Plan
from tests.emulated_cuda.comparing import measure_little
from tests.gpu.checks import Check

_GIB = 2**30
#: Largest difference of a prediction, as a share of what was measured. The times of emulated devices say nothing.
TOLERANCE = 0.1
_STEPS = 5
#: Of the model, and of its rows, so that products take a fast GPU longer than the host needs to start them.
_BLOCKS, _ROWS, _TOKENS = 8, 8, 2048


def cases(work: Work) -> Iterator[Case]:
    """One stage or several in one process, on a GPU that they fit; `work` gives the width of the model."""
    work = replace(work, layers=_BLOCKS, rows=_ROWS, tokens=_TOKENS)
    config = llama(work.hidden, work.layers, work.vocabulary, work.intermediate, max_position_embeddings=work.tokens)

    def case(name: str, num_stages: int, schedule: str, recompute: str, **values: Any) -> Case:
        given = {"rows": work.rows, "source": work.tokens, "target": work.tokens, "num_micro_batches": 2} | values
        of_case = {"num_stages": num_stages, "num_processes": 1, "schedule": schedule, "recompute": recompute}
        return Case(name, config, **of_case, **{"dtype": "bfloat16", "device": "cuda"} | given)

    yield case("graphs stay", 1, "gpipe", "none")
    yield case("blocks recompute", 1, "gpipe", "block")
    yield case("two stages recompute", 2, "1f1b", "stage")
    yield case("activations on the host", 2, "1f1b", "host")
    yield case("autocast", 1, "gpipe", "block", dtype="float32", training="bf16")
    yield case("packed", 1, "gpipe", "block", training="packed")
    yield case("chunks of rows", 1, "1f1b", "stage", rows=2, sequence_chunks=4)
    yield case("LoRA", 1, "gpipe", "none", training="lora")
    yield case("QLoRA", 1, "gpipe", "block", training="qlora")
    frozen, everything = ({"offload_weights": name} for name in ("frozen", "all"))
    yield case("LoRA, weights visit", 6, "breadth_first", "stage", training="lora", others=frozen)
    yield case("all weights visit", 6, "breadth_first", "stage", others=everything)
    yield case("dealt stages", 6, "round_robin", "stage", others=everything)


def checks(works: Sequence[Work], *, quick: bool, emulated: bool) -> list[Check]:
    """A check for each case, of the largest work that fits; with `quick` of a third."""
    chosen = [one for work in works[:1] for one in cases(work)][:: 3 if quick else 1]
    job = {"quick": quick, "emulated": emulated}
    return [Check("plan", one.name, "planned:compare", job | {"case": one}) for one in chosen]


def compare(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the layers, plan, and train a few steps: with all of the GPU's memory, and with as much as is planned."""
    case: Case = job["case"]
    if case.training == "qlora" and find_spec("bitsandbytes") is None:
        return {"skipped": "bitsandbytes is not installed"}
    if job["emulated"]:
        case = tiny(case)
        measure_little()
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    if case.weights_visit and not job["emulated"]:  # the host updates them
        torch.set_num_threads(psutil.cpu_count(logical=False) or 1)
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-gpu-") as folder:
        if case.reads_files:
            with device:  # where random numbers take no time
                model = AutoModelForCausalLM.from_config(case.config, dtype=getattr(torch, case.dtype))
            model.save_pretrained(folder)
            del model
            case = replace(case, folder=folder)
        machine = measure.this_machine(device)
        plan = planned([profile(case)], case, machine)
        pipe, seconds = train_pipeline(case, _STEPS, before_steps=lambda: _forget(device))
        if job["emulated"]:  # with the attention of a CPU, which keeps more, and no times
            return {}
        found = _judge(plan, seconds, device)
        del pipe
        found["problems"] += _fits(case, plan, device)
        return found


def _forget(device: torch.device) -> None:
    """Let the peaks begin at what the pipeline holds."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def _fits(case: Case, plan: Plan, device: torch.device) -> list[str]:
    """Whether two steps run in the memory of the plan; else how they fail."""
    _forget(device)
    planned_bytes = plan.processes[0].memory.total
    torch.cuda.set_per_process_memory_fraction(planned_bytes / torch.cuda.get_device_properties(device).total_memory)
    try:
        train_pipeline(case, 2)
    except (StageError, torch.OutOfMemoryError) as error:
        return [f"it does not run in the {planned_bytes / _GIB:.2f} GiB of its plan: {error}"]
    return []


def _judge(plan: Plan, seconds: tuple[float, ...], device: torch.device) -> dict[str, Any]:
    memory = plan.processes[0].memory
    free, total = torch.cuda.mem_get_info(device)
    peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    # torch's allocator gives the workspaces of cuBLAS too.
    predicted = memory.of_tensors + (plan.planner.device.workspace_bytes or 0)
    ratios = {"memory": predicted / peak, "time": plan.step_seconds / median(seconds)}
    figures: dict[str, Any] = {f"{name}, predicted / measured": ratio for name, ratio in ratios.items()}
    sizes = {"predicted": predicted, "measured": peak, "plan's total": memory.total, "reserved": reserved}
    sizes["beside the allocator"] = total - free - torch.cuda.memory_reserved(device)
    figures |= {f"{name} GiB": size / _GIB for name, size in sizes.items()}
    figures |= {"predicted seconds": plan.step_seconds, "measured seconds": median(seconds)}
    problems = [
        f"the {name} of a step is predicted {ratio:.2f} times as large as it is"
        for name, ratio in ratios.items()
        if abs(ratio - 1) > TOLERANCE
    ]
    return {"figures": figures, "problems": problems}
