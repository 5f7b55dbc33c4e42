"""Every block that a page marks with <!-- runs --> runs, two steps, on tiny models in place of those that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, MarianMTModel

from hf_gpipe.data import train_tokenizer
from tests.data.chat_templates import MARKED
from tests.data.chat_templates import tokenizer as chat_tokenizer
from tests.docs.pages import PAGES, REPOSITORY, Block
from tests.oracle import tiny_config

MARK = "<!-- runs -->"
#: Two steps, and nothing left to the planner, which has tests of its own.
DECIDED = 'max_steps=2, max_length=128, num_micro_batches=2, schedule="1f1b", recompute="none", partition="count"'
BLOCKS = [
    pytest.param(block, id=f"{page.name}:{block.line}") for page in PAGES for block in page.blocks if block.note == MARK
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model and a translation model of a few thousand parameters."""
    made = tmp_path_factory.mktemp("models")
    tokens = chat_tokenizer()
    tokens.chat_template = MARKED["llama 3"]
    tokens.save_pretrained(made / "chat")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokens), **sizes)).save_pretrained(made / "chat")
    words = ["3 Stunden", "vor 5 Tagen", "3 hours", "5 days ago"]
    train_tokenizer(words * 20, 290, made / "quickstart", model="bpe", character_coverage=1.0, target_tags=())
    tokens = AutoTokenizer.from_pretrained(made / "quickstart")
    ids = {"pad_token_id": tokens.pad_token_id, "eos_token_id": tokens.eos_token_id}
    config = tiny_config("marian", vocab_size=len(tokens), decoder_start_token_id=tokens.pad_token_id, **ids)
    MarianMTModel(config).save_pretrained(made / "quickstart")
    return made


@pytest.mark.parametrize("block", BLOCKS)
def test_a_marked_block_runs(block: Block, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert block.language == "python"
    text = re.sub(r'"Qwen/[^"]*"', repr(str(folder / "chat")), block.text)
    text = text.replace('"outputs/quickstart"', repr(str(folder / "quickstart")))
    text = re.sub(r'output_dir="out",(\s*)', rf'output_dir="out", {DECIDED},\1', text)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "block", "exec"), {"__name__": "__main__"})
    if 'save_pretrained("out")' in text or ".save_model()" in text:
        assert list((tmp_path / "out").glob("*.safetensors"))


def test_the_readme_trains_in_twelve_lines() -> None:
    page = next(page for page in PAGES if page.name == "README.md")
    assert len(page.lines) <= 110
    [block] = [block for block in page.blocks if block.note == MARK]
    assert len(block.text.splitlines()) <= 12
    assert ".train()" in block.text
