"""Pretrain a small causal language model on a text file, read as a stream: no length, no index, resumable.

python examples/pretrain.py TOKENIZER TEXT OUTPUT [--num_stages 2 --max_steps 1000 ...]
torchrun --nproc-per-node 2 examples/pretrain.py TOKENIZER TEXT OUTPUT --num_stages 2
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch.utils.data import IterableDataset
from transformers import AutoTokenizer, HfArgumentParser, LlamaConfig, PreTrainedTokenizerBase

from hf_gpipe import PipelineTrainer, PipelineTrainingArguments

LENGTH = 128


class Blocks(IterableDataset[dict[str, list[int]]]):
    """The text as blocks of `LENGTH` tokens, line after line, without padding."""

    def __init__(self, path: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self._path, self._tokenizer = path, tokenizer

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        tokens: list[int] = []
        with open(self._path, encoding="utf-8") as lines:
            for line in lines:
                tokens += self._tokenizer(line).input_ids
                while len(tokens) >= LENGTH:
                    yield {"input_ids": tokens[:LENGTH], "labels": tokens[:LENGTH]}
                    del tokens[:LENGTH]


def main(tokenizer_path: str, text: str, output: str, *options: str) -> None:
    defaults = ["--max_steps", "1000", "--num_micro_batches", "8", "--schedule", "1f1b", "--learning_rate", "1e-3"]
    parser = HfArgumentParser(PipelineTrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", output, *defaults, *options])
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    if tokenizer.pad_token is None:
        # Blocks are never padded, but the collator asks for it.
        tokenizer.pad_token = tokenizer.eos_token
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        max_position_embeddings=LENGTH,
    )
    # A configuration in place of a model: each process makes the weights of its own stages only.
    trainer = PipelineTrainer(
        model=config, args=args, train_dataset=Blocks(text, tokenizer), processing_class=tokenizer
    )
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
