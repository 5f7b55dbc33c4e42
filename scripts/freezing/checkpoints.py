"""Checkpoints that an earlier version has written, and the losses of the next five steps of a run that resumes them.

The checkpoints are in tests/frozen/checkpoints, one archive each. `write` makes them anew, with the code of the day;
once the code that wrote them is gone, they stay as they are.
"""

from __future__ import annotations

import io
import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_gpipe import PipelineDPOConfig, PipelineDPOTrainer, PipelineGRPOConfig, PipelineGRPOTrainer, PipelineTrainer
from hf_gpipe import PipelineTrainingArguments as Arguments
from hf_gpipe.data import PairCollator
from scripts.freezing.results import FOLDER, IN_FLOAT32, IN_FLOAT64, IN_HALF, Entries, Tolerance
from scripts.freezing.runs import four_bits, lora
from scripts.freezing.toys import Logs, Rows, config_of, model_of, preferences, prompts, tokenizer
from tests.gloo import run_gloo

FILE = "checkpoints.txt"
ARCHIVES = FOLDER / "checkpoints"
#: The step of the checkpoint, and the last step.
SAVED, LAST = 3, 8


@dataclass(frozen=True)
class Training:
    """A run that writes a checkpoint.

    Attributes:
        family: of the model.
        arguments: of the trainer.
        processes: how many, joined by gloo.
        config: changes of the model's configuration.
        kind: "", "dpo" or "grpo".
        adapters: whether LoRA is trained.
        four_bits: whether the model's weights are quantised, so that they are in the archive too.
        dtype: of the weights.
        resumed_with: other arguments of further runs that resume the checkpoint, by their name.
    """

    family: str = "llama"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""
    adapters: bool = False
    four_bits: bool = False
    dtype: torch.dtype = torch.float64
    resumed_with: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 2}
TRAININGS: dict[str, Training] = {
    "full": Training(
        "marian",
        {"schedule": "1f1b"},
        config={"dropout": 0.1},
        resumed_with={"three stages": {"num_stages": 3}, "one stage": {"num_stages": 1}},
    ),
    "tied": Training("t5", {"optim": "adafactor", "schedule": "gpipe"}, config={"tied": True}),
    "accumulation": Training("llama", {"gradient_accumulation_steps": 2, "optim": "sgd"}, resumed_with={}),
    "lora": Training(adapters=True, config={"dropout": 0.1}, resumed_with={"three stages": {"num_stages": 3}}),
    "nf4": Training(adapters=True, four_bits=True, config=_WIDE, dtype=torch.float32),
    "zero": Training(
        "marian",
        {"replicas": 2, "zero": 1},
        processes=4,
        config={"dropout": 0.1},
        resumed_with={"without": {"replicas": 2, "zero": 0}},
    ),
    "fp16": Training(arguments={"fp16": True}, dtype=torch.float32),
    "master weights": Training(arguments={"fp32_master_weights": True}, dtype=torch.bfloat16),
    "asynchronous": Training(arguments={"schedule": "pipedream", "recompute": "none"}, processes=2),
    "visits": Training(
        arguments={"num_stages": 4, "schedule": "breadth_first", "offload_weights": "all", "recompute": "stage"}
    ),
    "tensor": Training(arguments={"tensor_parallel": 2}, processes=4, resumed_with={}),
    "grpo": Training(kind="grpo"),
    "dpo": Training(kind="dpo", adapters=True),
}


def names() -> list[str]:
    """Each checkpoint, and each further run that resumes it."""
    return [f"{name}{way}" for name, own in TRAININGS.items() for way in ("", *(f", {w}" for w in own.resumed_with))]


def entries(wanted: Sequence[str]) -> Entries:
    """The losses of the steps after a checkpoint."""
    return {name: _resumed(name) for name in wanted}


def tolerance_of(name: str) -> Tolerance:
    """That of the checkpoint's training."""
    return tolerance_of_training(TRAININGS[name.partition(",")[0]])


def tolerance_of_training(training: Training) -> Tolerance:
    """By the narrowest type that a training computes in. Rewards and advantages of GRPO are of float32, and its sampled
    tokens are the same as long as no probability lies within rounding of a draw."""
    if training.dtype == torch.bfloat16 or training.arguments.get("fp16") or training.arguments.get("bf16"):
        return IN_HALF
    if training.dtype == torch.float32 or training.adapters or training.kind == "grpo":
        return IN_FLOAT32
    return IN_FLOAT64


def prepare() -> None:
    """Write all checkpoints anew."""
    for name, training in TRAININGS.items():
        with tempfile.TemporaryDirectory(prefix="hf_gpipe-freeze-") as folder:
            base = Path(folder) / "base"
            if training.four_bits:
                model_of(config_of(training.family, **training.config), dtype=torch.float32).save_pretrained(base)
            train(training, folder, {}, resumes=False)
            output = Path(folder) / "out"
            paths = [output / f"checkpoint-{SAVED}", *([base] if training.four_bits else [])]
            _archive(ARCHIVES / f"{name.replace(' ', '_')}.tar.xz", Path(folder), paths)


def _archive(path: Path, root: Path, folders: Sequence[Path]) -> None:
    """Write folders into an archive, whose bytes depend on their files alone."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for file in sorted(file for folder in folders for file in folder.rglob("*") if file.is_file()):
            info = tarfile.TarInfo(str(file.relative_to(root)))
            info.size = file.stat().st_size
            archive.addfile(info, io.BytesIO(file.read_bytes()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(data.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def _resumed(name: str) -> str:
    of, _, way = name.partition(", ")
    training = TRAININGS[of]
    path = ARCHIVES / f"{of.replace(' ', '_')}.tar.xz"
    if not path.exists():
        return "there is no checkpoint"
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-freeze-") as folder:
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
        others = training.resumed_with[way] if way else {}
        text = train(training, folder, others, resumes=True)
        shutil.rmtree(folder, ignore_errors=True)
        Path(folder).mkdir()
    return text


def train(training: Training, folder: str, others: Mapping[str, Any], *, resumes: bool) -> str:
    """Train in as many processes as there shall be; the logged numbers of each step.

    Args:
        training: says how.
        folder: for the output, or with the checkpoint to resume.
        others: arguments that replace those of the training.
        resumes: whether the checkpoint is resumed.
    """
    if training.processes == 1:
        return _train(training, folder, others, resumes)
    return str(run_gloo(_train, training.processes, training, folder, others, resumes)[0])


def _train(training: Training, folder: str, others: Mapping[str, Any], resumes: bool) -> str:
    """Train in this process, which may be one of several."""
    torch.manual_seed(0)
    logs = Logs()
    made = _trainer(training, Path(folder), logs, others)
    checkpoint = str(Path(folder) / "out" / f"checkpoint-{SAVED}") if resumes else None
    made.train(resume_from_checkpoint=checkpoint)
    lines = []
    for line in logs.lines:
        if "loss" in line or "eval_loss" in line:
            own = {
                key: line[key]
                for key in ("loss", "eval_loss", "grad_norm", "learning_rate", "reward", "rewards/margins")
                if key in line
            }
            lines.append(" ".join(f"{key} {float(value)!r}" for key, value in own.items()))
    return "\n".join(lines)


def _trainer(training: Training, folder: Path, logs: Logs, others: Mapping[str, Any]) -> PipelineTrainer:
    common: dict[str, Any] = {
        "num_stages": 2,
        "num_micro_batches": 2,
        "schedule": "1f1b",
        "recompute": "none",
        "partition": "count",
        "max_steps": LAST,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-4,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": SAVED,
        "save_in_background": "never",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
    }
    values = {**common, **training.arguments, **others, "output_dir": str(folder / "out")}
    config = config_of(training.family, **{**training.config, **({"vocab_size": 300} if training.kind else {})})
    model: Any = str(folder / "base") if training.four_bits else model_of(config, dtype=training.dtype)
    given: dict[str, Any] = {"callbacks": [logs]}
    if training.adapters:
        given["peft_config"] = lora()
    if training.four_bits:
        given["quantization_config"] = four_bits("nf4")
    if training.kind == "dpo":
        args = PipelineDPOConfig(**values, beta=0.5)
        return PipelineDPOTrainer(
            model, args=args, train_dataset=preferences(24), processing_class=tokenizer(), **given
        )
    if training.kind == "grpo":
        values |= {"num_generations": 3, "max_completion_length": 5, "per_device_train_batch_size": 2, "beta": 0.0}
        return PipelineGRPOTrainer(
            *(model, _length, PipelineGRPOConfig(**values)),
            train_dataset=prompts(24),
            processing_class=tokenizer(),
            **given,
        )
    rows = Rows(24, is_causal=not config.is_encoder_decoder)
    held_out = Rows(8, is_causal=not config.is_encoder_decoder, seed=1) if "eval_strategy" in values else None
    return PipelineTrainer(model, Arguments(**values), PairCollator(pad_token_id=0), rows, held_out, **given)


def _length(completions: Sequence[str], **_: Any) -> list[float]:
    """A reward that any completion has: the share of its letters that are vowels or spaces."""
    return [sum(letter in "aeiou " for letter in text) / max(len(text), 1) for text in completions]
