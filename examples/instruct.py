"""Instruction tuning of a causal model, with the loss on the completions only.

    python examples/instruct.py MODEL EXAMPLES OUTPUT [--num_stages 4 --bf16 ...]
    torchrun --nproc-per-node 4 examples/instruct.py MODEL EXAMPLES OUTPUT --num_stages 4

EXAMPLES is a file of JSON lines {"prompt": ..., "completion": ...}.
"""

from __future__ import annotations

import sys
from typing import Any

from datasets import load_dataset
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, HfArgumentParser

from hf_gpipe import PipelineTrainer, PipelineTrainingArguments


def main(model: str, examples: str, output: str, *options: str) -> None:
    defaults = ["--num_micro_batches", "8", "--learning_rate", "2e-5", "--lr_scheduler_type", "cosine"]
    parser = HfArgumentParser(PipelineTrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", output, *defaults, *options])
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    def encode(row: dict[str, str]) -> dict[str, Any]:
        prompt = tokenizer(row["prompt"], add_special_tokens=False).input_ids
        completion = [*tokenizer(row["completion"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        # A position whose label is -100 has no loss.
        return {"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion}

    rows = load_dataset("json", data_files=examples, split="train")
    trainer = PipelineTrainer(
        model=model,
        args=args,
        # It pads the labels with -100, and ids on the right.
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        train_dataset=rows.map(encode, remove_columns=rows.column_names),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()


if __name__ == "__main__":
    main(*sys.argv[1:])
