"""Two hundred plans: the decided configuration, the seconds, and the bytes of each process.

Recipes x named devices, meshes, modes and what is left to the planner. All devices are data sheets (`--device`), so no
plan depends on the speed of the machine that makes it. Models that are on a hub are replaced by the configurations of
docs/your_model.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hf_gpipe.commands.plan import main as plan_command
from hf_gpipe.commands.plan import read_request
from hf_gpipe.planner.report import as_dict
from scripts.freezing.results import Entries, Tolerance

FILE = "plans.txt.xz"
ROOT = Path(__file__).resolve().parents[2]
#: A configuration of a model's size, by the recipes whose model is on a hub.
_MODELS = {
    "causal/lora": "7b",
    "causal/qlora": "7b",
    "causal/offload": "3b",
    "translation/decoder-only": "1.5b",
    **{f"causal/{name}": "1.5b" for name in ("chat", "classify", "distil", "dpo", "kto", "reward")},
}
#: Recipes whose configuration is on a hub alone.
ABSENT = ("causal/embeddings", "images/questions")

_AUTO = (
    "pipeline.partition=auto",
    "pipeline.recompute=auto",
    "pipeline.schedule=auto",
    "pipeline.num_micro_batches=auto",
)
_MESH = ("pipeline.num_stages=auto", "pipeline.replicas=auto")


def tolerance_of(name: str) -> Tolerance:
    """Seconds are sums of floats, which may be added up in another order. Bytes, counts and choices are exact."""
    return Tolerance(1e-9)


def names() -> list[str]:
    """The names of all plans; those of one recipe are neighbours, so that its layers are traced once."""
    return list(_plans())


def entries(wanted: Sequence[str]) -> Entries:
    """The texts of some plans, or of the error in their place."""
    return {name: _told(_plans()[name]) for name in wanted}


def _told(arguments: Sequence[str]) -> str:
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(errors):
            plan = read_request(arguments).best()
    except Exception as error:  # a failure of the planner is what it does, and one plan's alone
        return f"{type(error).__name__}: {str(error).replace(str(ROOT), '.')}"
    found, table = as_dict(plan), plan.timeline.schedule
    lines = [f"{key} = {json.dumps(value)}" for key, value in sorted(found["settings"].items())]
    for key in (
        "device",
        "memory_limit_bytes",
        "num_parameters",
        "rows",
        "step_seconds",
        "bubble",
        "peak_bytes",
        "fits",
    ):
        lines.append(f"{key}: {json.dumps(found[key])}")
    for stage in found["stages"]:
        lines.append(
            f"stage {stage['stage']} in {stage['process']}: {stage['layers']} layers, {stage['num_parameters']} "
            f"parameters, recompute {stage['recompute']}, {stage['memory_bytes']['total']} bytes, "
            f"busy {stage['busy_seconds']!r}"
        )
    for process in found["processes"]:
        own = ", ".join(f"{key} {process[key]}" for key in ("copy_bytes", "offloaded_bytes", "hosted_bytes"))
        lines.append(f"process {process['process']}: {process['memory_bytes']['total']} bytes, {own}")
    if found["settings"]["schedule"].endswith(".txt"):
        lines.append(table.text())
    return "\n".join(lines).replace(str(ROOT), ".")


# ---------------------------------------------------------------------- what a planner says of another's plans


def decided(name: str) -> dict[str, Any]:
    """The arguments of a plan with everything decided that the planner has chosen, and the table that it has made.

    Raises:
        UserError: there is no such plan.
    """
    arguments = _plans()[name]
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        request = read_request(arguments)
        plan = request.best()
    settings = as_dict(plan)["settings"]
    own = {key: value for key, value in settings.items() if key in plan.settings.of_plan}
    table = plan.timeline.schedule.text() if settings["schedule"].endswith(".txt") else None
    if table is not None:
        own |= {"placement": None, "recompute": "block" if own["recompute"] == "block" else "stage"}
    return {
        "arguments": list(arguments),
        "keys": own,
        "table": table,
        "step_seconds": plan.step_seconds,
        "fits": plan.fits,
        "peak_bytes": plan.peak_bytes,
    }


def account(plans: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The account that this planner gives of decided plans: seconds, peak, and whether each fits, or its error."""
    return {name: _accounted(plan) for name, plan in plans.items()}


def _accounted(plan: Mapping[str, Any]) -> dict[str, Any]:
    output, errors = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        keys = dict(plan["keys"])
        if plan["table"] is not None:
            path = Path(folder) / "table.txt"
            path.write_text(plan["table"])
            keys["schedule"] = str(path)
        overrides = [f"pipeline.{key}={json.dumps(value)}" for key, value in keys.items()]
        arguments = [word for word in plan["arguments"] if _key_of(word) not in keys]
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = plan_command([*arguments, *overrides, "--json"])
    if code > 1:
        return {"error": errors.getvalue().strip()}
    found = json.loads(output.getvalue())
    return {key: found[key] for key in ("step_seconds", "peak_bytes", "fits")}


def _key_of(word: str) -> str | None:
    """The key of `pipeline` that an argument of the command gives."""
    key, is_override, _ = word.partition("=")
    return key.removeprefix("pipeline.") if is_override and key.startswith("pipeline.") else None


# ---------------------------------------------------------------------- the cases


@cache
def _plans() -> dict[str, tuple[str, ...]]:
    """The arguments of the command `plan` of each case."""
    plans: dict[str, tuple[str, ...]] = {}
    for recipe, *words in _cases():
        path = ROOT / "recipes" / f"{recipe}.yaml"
        plans[" ".join((recipe, *words))] = (str(path), *model_of(recipe), *words)
    return plans


def model_of(recipe: str) -> list[str]:
    """Overrides that replace the models of a hub."""
    models = ROOT / "docs" / "your_model"
    own = [f"model.path={models / _MODELS[recipe]}"] if recipe in _MODELS else []
    return [*own, *([f"distillation.teacher={models / '3b'}"] if recipe == "causal/distil" else [])]


def _cases() -> Iterator[tuple[str, ...]]:
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        recipe = str(path.relative_to(ROOT / "recipes").with_suffix(""))
        if recipe in ABSENT:
            continue
        yield (recipe, "--device", "a100-80")
        yield (recipe, "--device", "rtx3090", "--memory", "16GiB")
        if "paper" in recipe or recipe in _MODELS:
            yield (recipe, *_AUTO[:2], "--devices", "4", "--device", "rtx4090")
        yield from (own for own in _of_modes() if own[0] == recipe)


def _of_modes() -> Iterator[tuple[str, ...]]:
    lora, small, pairs, pretrain = "causal/lora", "causal/chat", "translation/paper-400m", "causal/pretrain"
    four = ("--devices", "4", "--device", "rtx3090")
    # What is left open.
    for devices, device in (("1", "a100-80"), ("2", "rtx3090"), ("4", "rtx4090"), ("8", "v100-16")):
        yield (lora, *_AUTO, "--devices", devices, "--device", device)
        yield (lora, *_AUTO, *_MESH, "--devices", devices, "--device", device)
        yield (lora, *_AUTO, *_MESH, "pipeline.offload_weights=auto", "--devices", devices, "--device", device)
        yield (pairs, *_AUTO, *_MESH, "--devices", devices, "--device", device)
        yield (small, *_AUTO, *_MESH, "training.fp32_master_weights=true", "--devices", devices, "--device", device)
    for recompute in ("none", "block", "stage", "host", "auto"):
        yield (lora, "pipeline.num_stages=4", f"pipeline.recompute={recompute}", *four)
        yield (pairs, f"pipeline.recompute={recompute}", "--devices", "8", "--device", "v100-16")
    for partition in ("count", "parameters", "flops", "auto"):
        yield (pretrain, f"pipeline.partition={partition}", "--devices", "4", "--device", "rtx3090")
    for schedule in (
        *("naive", "gpipe", "gpipe_fused", "1f1b", "interleaved_1f1b", "breadth_first", "zb_h1", "zb_h2"),
        *("vocab_1f1b", "vocab_gpipe", "pipedream", "pipedream_vertical", "pipedream_2bw", "pipedream_naive"),
    ):
        decided = ("pipeline.num_stages=4", "pipeline.num_micro_batches=8", "pipeline.recompute=stage")
        yield (small, f"pipeline.schedule={schedule}", *decided, *four)
        if not schedule.startswith("pipedream"):
            yield (small, f"pipeline.schedule={schedule}", *decided[:2], "pipeline.recompute=auto", *four)
    for schedule in ("zb_v", "v_half"):
        yield (small, f"pipeline.schedule={schedule}", "pipeline.num_stages=8", "pipeline.num_micro_batches=8", *four)
    # Modes and pairs of them.
    four_stages = ("pipeline.num_stages=4", "pipeline.num_micro_batches=8", "pipeline.recompute=stage")
    visits = ("pipeline.num_stages=14", "pipeline.num_micro_batches=4", "--device", "rtx3090", "--host-memory", "64GiB")
    for word in ("2", "4", "auto", "'512 tokens'"):
        yield (lora, f"pipeline.sequence_chunks={word.strip(chr(39))}", "pipeline.schedule=1f1b", *four_stages, *four)
    yield (
        lora,
        "pipeline.sequence_chunks=4",
        "pipeline.chunk_taper=auto",
        "pipeline.schedule=1f1b",
        *four_stages,
        *four,
    )
    yield (lora, "pipeline.sequence_chunks=4", "pipeline.schedule=zb_h1", "pipeline.num_stages=4", *four)
    yield (lora, "pipeline.sequence_chunks=2", "pipeline.recompute=host", "pipeline.num_stages=4", *four)
    yield (lora, "pipeline.sequence_chunks=2", "pipeline.replicas=2", "pipeline.num_stages=2", *four)
    yield (lora, "pipeline.sequence_chunks=2", "pipeline.tensor_parallel=2", "pipeline.num_stages=2", *four)
    for visitors in ("frozen", "all", "auto"):
        yield (lora, f"pipeline.offload_weights={visitors}", *visits, "--devices", "2")
        yield (lora, f"pipeline.offload_weights={visitors}", "pipeline.num_stages=auto", *visits[2:], "--devices", "1")
    yield (small, "pipeline.offload_weights=all", "pipeline.schedule=round_robin", *visits, "--devices", "4")
    yield (small, "pipeline.offload_weights=all", *_MESH[:1], *_AUTO, *visits[2:], "--devices", "4")
    yield (lora, "pipeline.offload_weights=frozen", "pipeline.tensor_parallel=2", *visits, "--devices", "4")
    yield (lora, "pipeline.offload_weights=frozen", "pipeline.sequence_chunks=2", *visits, "--devices", "2")
    for size in ("2", "4"):
        yield (lora, f"pipeline.tensor_parallel={size}", "pipeline.num_stages=2", *_AUTO, "--devices", "8", *four[2:])
        yield (pairs, f"pipeline.tensor_parallel={size}", "pipeline.num_stages=2", *_AUTO, "--devices", "8", *four[2:])
    yield (small, "pipeline.tensor_parallel=2", *_MESH, *_AUTO, "--devices", "8", *four[2:])
    for schedule in ("vocab_1f1b", "vocab_gpipe"):
        yield (small, f"pipeline.schedule={schedule}", "pipeline.num_stages=2", "pipeline.replicas=2", *four)
        yield (small, f"pipeline.schedule={schedule}", "pipeline.num_stages=4", "pipeline.recompute=host", *four)
    # Replicas, and what is shared by them.
    for zero in ("0", "1"):
        replicas = ("pipeline.num_stages=2", "pipeline.replicas=2", f"pipeline.zero={zero}")
        yield (pairs, *replicas, *_AUTO, "--devices", "4", *four[2:])
        yield (pretrain, *replicas, "--devices", "4", "--device", "rtx4090")
        yield (small, *_AUTO, *_MESH, f"pipeline.zero={zero}", "--devices", "8", *four[2:])
    yield (pretrain, "pipeline.num_stages=2", "pipeline.replicas=[2,1]", "--devices", "3", *four[2:])
    yield (
        pretrain,
        "pipeline.num_stages=2",
        "pipeline.replicas=[1,3]",
        "pipeline.schedule=pipedream",
        "--devices",
        "4",
    )
    # Unlike devices, clusters, links and limits.
    yield (small, *_AUTO, "pipeline.num_stages=2", "--device", "rtx4090,rtx3090")
    yield (lora, *_AUTO, "pipeline.num_stages=4", "--device", "a100-80,a100-80,rtx3090,rtx3090")
    yield (small, *_AUTO, *_MESH, "--devices", "2x4@25Gbit/s+50us,150GB/s+5us", "--device", "rtx4090")
    yield (pairs, *_AUTO, *_MESH, "--devices", "4x4", "--device", "a100-80")
    yield (small, *_AUTO, "pipeline.num_stages=2", "--memory", "24GiB,12GiB", "--devices", "2")
    yield (small, *_AUTO, "pipeline.num_stages=4", "--link", "ethernet-10", *four)
    yield (small, "pipeline.boundary_dtype=bfloat16", "pipeline.num_stages=4", "--link", "ethernet-10", *four)
    for memory in ("2GiB", "4GiB", "8GiB", "12GiB"):
        yield (small, *_AUTO, "pipeline.num_stages=2", "--devices", "2", "--memory", memory)
    # The optimizer, adapters, precision and packing.
    for optim in ("adamw_torch", "sgd", "adafactor", "rmsprop", "adamw_8bit"):
        yield (small, f"training.optim={optim}", "pipeline.num_stages=4", *four)
    for words in (
        ("training.offload_optimizer=true",),
        ("training.fp32_master_weights=true", "model.dtype=bfloat16", "training.bf16=false"),
        ("training.packing=true",),
        ("training.gradient_accumulation_steps=4",),
        ("training.save_in_background=never",),
        ("training.max_grad_norm=0",),
        ("model.quantization=nf4", "lora.r=16"),
        ("pipeline.torch_compile=true",),
    ):
        yield (small, *words, "pipeline.num_stages=2", "--devices", "2", *four[2:])
