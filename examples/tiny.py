"""Saves a tiny chat model with random weights: a Llama of four blocks, whose tokenizer reads single bytes.

python examples/tiny.py OUTPUT

It needs no download. The tutorials train it in place of a real model.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed


def main(output: str) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = Path(__file__).with_name("chatml.jinja").read_text()
    tokenizer.save_pretrained(output)
    set_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
