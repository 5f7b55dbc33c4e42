"""Compares supervised fine-tuning with TRL's SFTTrainer: the largest differences over 20 steps, as a table.

python scripts/compare_trl.py              llama, qwen2 and gemma2 in 1, 2 and 3 stages, all weights and with LoRA
python scripts/compare_trl.py llama        one family

Tiny models with random weights in float32; TRL, peft and the library `datasets` must be installed.
"""

from __future__ import annotations

import copy
import random
import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from hf_gpipe import PipelineSFTConfig, PipelineSFTTrainer

FAMILIES = ("llama", "qwen2", "gemma2")
METRICS = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
#: Of a sequence of stages, the rows and the options that are compared.
CASES: dict[int, tuple[str, dict[str, Any]]] = {
    1: ("text", {}),
    2: ("completion", {"packing": True, "max_length": 40}),
    3: ("completion", {"schedule": "1f1b", "num_micro_batches": 3}),
}
_SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


class Logs(TrainerCallback):
    """Keeps the lines with a loss."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.lines.append(dict(logs))


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single characters."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "</s>", *"abcdefghijklmnopqrstuvwxyz .:"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="<pad>")


def rows(kind: str) -> list[dict[str, str]]:
    rng = random.Random(0)

    def text() -> str:
        return "".join(rng.choices("abcdefgh ", k=rng.randint(3, 30)))

    if kind == "text":
        return [{"text": text()} for _ in range(40)]
    return [{"prompt": f"{text()}:", "completion": text()} for _ in range(40)]


def differences(family: str, num_stages: int, *, lora: bool) -> dict[str, float]:
    """The largest difference of each metric."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **_SIZES, **({"head_dim": 8} if family == "gemma2" else {}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    kind, options = CASES[num_stages]
    own = {"num_stages": num_stages, "num_micro_batches": 2}
    own |= {name: options[name] for name in ("schedule", "num_micro_batches") if name in options}
    logs: list[list[dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            **{"output_dir": folder, "max_steps": 20, "logging_steps": 1, "learning_rate": 5e-3, "bf16": False},
            **{
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "use_cpu": True,
                "report_to": "none",
            },
            **{"train_sampling_strategy": "sequential", "save_strategy": "no", "optim": "adamw_torch"},
            **{name: value for name, value in options.items() if name not in own},
        }
        for args, cls in (
            (PipelineSFTConfig(**common, **own), PipelineSFTTrainer),
            (SFTConfig(**common, gradient_checkpointing=False), SFTTrainer),
        ):
            seen = Logs()
            made = cls(
                copy.deepcopy(model),
                args=args,
                train_dataset=Dataset.from_list(rows(kind)),
                processing_class=tokenizer(),
                callbacks=[seen],
            )
            made.train()
            logs.append(seen.lines)
    mine, theirs = logs
    return {
        name: max(abs(float(a[name]) - float(b[name])) for a, b in zip(mine, theirs, strict=True)) for name in METRICS
    }


def main(families: list[str]) -> int:
    lines = [f"| family | stages | weights | rows | {' | '.join(METRICS)} |", f"|---|{'---|' * (3 + len(METRICS))}"]
    worst = 0.0
    for family in families:
        for num_stages, (kind, options) in CASES.items():
            for lora in (False, True):
                found = differences(family, num_stages, lora=lora)
                worst = max(worst, found["loss"])
                name = f"{kind}, packed" if options.get("packing") else kind
                cells = " | ".join(f"{value:.1e}" for value in found.values())
                lines.append(f"| {family} | {num_stages} | {'LoRA' if lora else 'all'} | {name} | {cells} |")
    print("\n".join(["", *lines]))
    return int(worst > 1e-5)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:] or list(FAMILIES)))
