"""Learn from rewards alone: a new model of 0.1 million parameters learns to answer with the letter that is asked for.

    python examples/grpo.py                          # both stages in one process, on a CPU
    torchrun --nproc-per-node 2 examples/grpo.py     # a process for each stage

Each step generates eight completions for every prompt, and a function says how good each of them is.
"""

from __future__ import annotations

import sys
import tempfile

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from hf_gpipe import PipelineGRPOConfig, PipelineGRPOTrainer

LETTERS = "abcdefgh"


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each letter, one that ends a text, and a colon."""
    names = ["<end>", ":", *LETTERS]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=":"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>", unk_token=":")


def share_of_letter(completions: list[str], letter: list[str], **columns: object) -> list[float]:
    """The share of four characters that are the right letter."""
    return [text.count(right) / 4 for text, right in zip(completions, letter, strict=True)]


def main(max_steps: int) -> list[float]:
    """Train, and return the mean reward at each log."""
    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=words.pad_token_id,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
    )
    with tempfile.TemporaryDirectory() as folder:
        args = PipelineGRPOConfig(
            output_dir=folder,
            num_stages=2,
            num_micro_batches=2,
            per_device_train_batch_size=8,
            num_generations=8,
            max_completion_length=4,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            num_iterations=2,
            max_steps=max_steps,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        )
        rows = [{"prompt": f"{letter}:", "letter": letter} for letter in LETTERS] * 4
        trainer = PipelineGRPOTrainer(config, share_of_letter, args, train_dataset=rows, processing_class=words)
        trainer.train()
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        trainer.end()
    return rewards


if __name__ == "__main__":
    rewards = main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
    print("mean reward:", " ".join(f"{reward:.2f}" for reward in rewards))
