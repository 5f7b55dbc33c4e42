"""A script as a user would write it; under torchrun, rank 1 has another value of something than the others."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from hf_gpipe import Pipeline, PipelineTrainer, PipelineTrainingArguments
from hf_gpipe.tasks.dpo import PipelineDPOConfig, PipelineDPOTrainer
from hf_gpipe.tasks.sft import PipelineSFTConfig, PipelineSFTTrainer

ROWS = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(4)]


def run(what: str, model: str, other: str, output: str) -> None:
    """Do it all; `what` names what rank 1 has another value of."""
    is_odd = os.environ["RANK"] == "1"

    def pick(name: str, usual: Any, odd: Any) -> Any:
        return odd if is_odd and what == name else usual

    common: dict[str, Any] = {
        **{"output_dir": output, "use_cpu": True, "report_to": "none", "save_strategy": "no", "num_stages": 2},
        **{"per_device_train_batch_size": 2, "ddp_timeout": 60, "learning_rate": pick("learning_rate", 1e-3, 2e-3)},
        **{"max_steps": pick("max_steps", 1, 2), "bf16": False, "num_micro_batches": 2, "disable_tqdm": is_odd},
    }
    if what == "dpo":
        PipelineDPOTrainer(model, args=PipelineDPOConfig(**common, beta=0.2 if is_odd else 0.1))
    if what == "sft":
        PipelineSFTTrainer(model, args=PipelineSFTConfig(**common, max_length=8 if is_odd else 16))
    if what == "stages":
        Pipeline(model, 2, schedule="1f1b" if is_odd else "gpipe", num_micro_batches=2, device="cpu")
    if what == "configuration":
        config = LlamaConfig.from_pretrained(model, rms_norm_eps=1e-3 if is_odd else 1e-6)
        Pipeline(config, 2, device="cpu")
    if what == "weights in memory":
        Pipeline(AutoModelForCausalLM.from_pretrained(other if is_odd else model), 2, device="cpu")
    trainer = PipelineTrainer(
        pick("model", model, other),
        PipelineTrainingArguments(**common),
        train_dataset=ROWS if os.environ["RANK"] == "0" else None,
    )
    options = {"max_new_tokens": pick("generate", 2, 3), "generation_config": GenerationConfig(do_sample=False)}
    trainer.pipe.generate(input_ids=torch.ones(1, 2, dtype=torch.long), **options)
    trainer.train()
    Path(output, f"trained-{os.environ['RANK']}").touch()


def as_script(*words: str) -> int:
    """`run` as the interpreter runs a script: what it does not catch goes to the hook for exceptions."""
    try:
        run(*words)
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0
