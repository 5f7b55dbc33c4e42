"""Compares supervised fine-tuning with TRL's SFTTrainer: the largest differences over 20 steps, as a table.

python scripts/compare_trl.py              llama, qwen2 and gemma2 in 1, 2 and 3 stages; all weights, and LoRA on
                                           the blocks, on the embeddings too, and with added tokens
python scripts/compare_trl.py llama        one family

Tiny models with random weights in float32; TRL, peft and the library `datasets` must be installed. Saved adapters must
be the same after peft has read them, bit for bit.
"""

from __future__ import annotations

import copy
import random
import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
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
#: What is trained: the options of LoRA, and how many tokens are added to the vocabulary.
WEIGHTS: dict[str, tuple[dict[str, Any] | None, int]] = {
    "all": (None, 0),
    "LoRA": ({}, 0),
    "LoRA on embeddings": ({"target_modules": ["q_proj", "v_proj", "embed_tokens"]}, 0),
    "LoRA, whole embeddings": ({"modules_to_save": ["embed_tokens", "lm_head"]}, 2),
    "LoRA, added tokens": ({"trainable_token_indices": [64, 65]}, 2),
}
_SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single characters. The last two are there once the vocabulary of the model has grown."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "</s>", *"abcdefghijklmnopqrstuvwxyz .:"])}
    vocabulary |= {"[": _SIZES["vocab_size"], "]": _SIZES["vocab_size"] + 1}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="<pad>")


def rows(kind: str, *, has_added: bool) -> list[dict[str, str]]:
    rng = random.Random(0)

    def text() -> str:
        return "".join(rng.choices("abcdefgh []" if has_added else "abcdefgh ", k=rng.randint(3, 30)))

    if kind == "text":
        return [{"text": text()} for _ in range(40)]
    return [{"prompt": f"{text()}:", "completion": text()} for _ in range(40)]


def check_saved(trainer: Any, model: Any, folder: str) -> None:
    """Raise AssertionError unless the adapters that a trainer saves are the same after peft has read them."""
    trainer.save_model(folder)
    read = dict(PeftModel.from_pretrained(copy.deepcopy(model).unload(), folder).base_model.model.named_parameters())
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, read[name]), name


def differences(family: str, num_stages: int, weights: str) -> dict[str, float]:
    """The largest difference of each metric."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **_SIZES, **({"head_dim": 8} if family == "gemma2" else {}))
    if weights == "LoRA, added tokens":
        config.tie_word_embeddings = False  # TRL reads a bias of the head, which peft's wrapper of a tied head has not
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    lora, num_added = WEIGHTS[weights]
    if num_added:
        model.resize_token_embeddings(_SIZES["vocab_size"] + num_added)
    if lora is not None:
        given = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]} | lora
        model = get_peft_model(model, LoraConfig(**copy.deepcopy(given)))
    kind, options = CASES[num_stages]
    own = {"num_stages": num_stages, "num_micro_batches": 2}
    own |= {name: options[name] for name in ("schedule", "num_micro_batches") if name in options}
    logs: list[list[dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            **{"output_dir": folder, "max_steps": 20, "logging_steps": 1, "learning_rate": 5e-3, "bf16": False},
            **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "use_cpu": True},
            "report_to": "none",
            **{"train_sampling_strategy": "sequential", "save_strategy": "no", "optim": "adamw_torch"},
            **{name: value for name, value in options.items() if name not in own},
        }
        for args, cls in (
            (PipelineSFTConfig(**common, **own), PipelineSFTTrainer),
            (SFTConfig(**common, gradient_checkpointing=False), SFTTrainer),
        ):
            data = Dataset.from_list(rows(kind, has_added=bool(num_added)))
            made = cls(copy.deepcopy(model), args=args, train_dataset=data, processing_class=tokenizer())
            made.train()
            logs.append([line for line in made.state.log_history if "loss" in line])
            if cls is PipelineSFTTrainer and lora is not None:
                check_saved(made, model, folder)
    mine, theirs = logs
    return {
        name: max(abs(float(a[name]) - float(b[name])) for a, b in zip(mine, theirs, strict=True)) for name in METRICS
    }


def main(families: list[str]) -> int:
    lines = [f"| family | stages | weights | rows | {' | '.join(METRICS)} |", f"|---|{'---|' * (3 + len(METRICS))}"]
    worst = 0.0
    for family in families:
        for num_stages, (kind, options) in CASES.items():
            for weights in WEIGHTS:
                by_metric = differences(family, num_stages, weights)
                worst = max(worst, by_metric["loss"])
                name = f"{kind}, packed" if options.get("packing") else kind
                cells = " | ".join(f"{value:.1e}" for value in by_metric.values())
                lines.append(f"| {family} | {num_stages} | {weights} | {name} | {cells} |")
    print("\n".join(["", *lines]))
    return int(worst > 1e-5)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:] or list(FAMILIES)))
