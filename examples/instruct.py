"""Instruction tuning of a causal model on conversations, with the loss on what the assistant says.

    python examples/instruct.py MODEL ROWS OUTPUT [--num_stages 4 --bf16 ...]
    torchrun --nproc-per-node 4 examples/instruct.py MODEL ROWS OUTPUT --num_stages 4

ROWS is a file of JSON lines, such as examples/chats.jsonl: `messages`, ShareGPT's `conversations`, or `prompt` and
`completion`, which may be text. A tokenizer without a chat template gets that of examples/chatml.jinja.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer, DataCollatorForSeq2Seq, HfArgumentParser

from hf_gpipe import PipelineTrainer, PipelineTrainingArguments
from hf_gpipe.data import ChatExamples


def main(model: str, path: str, output: str, *options: str) -> None:
    defaults = ["--num_micro_batches", "8", "--learning_rate", "2e-5", "--lr_scheduler_type", "cosine"]
    parser = HfArgumentParser(PipelineTrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", output, *defaults, *options])
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.chat_template is None:
        tokenizer.chat_template = Path(__file__).with_name("chatml.jinja").read_text()
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    trainer = PipelineTrainer(
        model=model,
        args=args,
        # It pads the labels with -100, and ids on the right.
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        train_dataset=ChatExamples(rows, tokenizer, max_length=1024),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
