"""`hf-gpipe generate`: what plain transformers generates, for texts, chats and adapters."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, MarianMTModel, PreTrainedModel, PreTrainedTokenizerFast

from hf_gpipe import Pipeline
from hf_gpipe.commands import generate
from hf_gpipe.data import train_tokenizer
from tests.oracle import tiny_config

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder-only model, an encoder-decoder, and their tokenizer."""
    where = tmp_path_factory.mktemp("generate")
    train_tokenizer(["one two three four"] * 20, 290, where, model="bpe", character_coverage=1.0, target_tags=())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(where)
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "eos_token_id": None}
    pairs = tiny_config("marian", **ids | {"decoder_start_token_id": tokenizer.pad_token_id})
    causal = tiny_config("llama")
    causal.update(ids)
    torch.manual_seed(0)
    for name, model in (("pairs", MarianMTModel(pairs)), ("causal", LlamaForCausalLM(causal))):
        model.save_pretrained(where / name)
        tokenizer.save_pretrained(where / name)
    return where


def by_transformers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: str, **options: int) -> str:
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=model.config.is_encoder_decoder).input_ids
    start = 0 if model.config.is_encoder_decoder else ids.shape[1]
    text: str = tokenizer.decode(model.generate(ids, **options)[0, start:], skip_special_tokens=True)
    return text


def test_lines_texts_and_chats(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--device", "cpu", "--num-stages", "2", "--max-new-tokens", "4"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = MarianMTModel.from_pretrained(folder / "pairs")
    assert generate.main([str(folder / "pairs"), "one two", "--num-beams", "2", *options]) == 0
    assert capsys.readouterr().out == (
        by_transformers(model, tokenizer, "one two", max_new_tokens=4, num_beams=2) + "\n"
    )

    model, plain = LlamaForCausalLM.from_pretrained(folder / "causal"), []
    for prompt in ("one", "two three four", "four"):
        plain.append(by_transformers(model, tokenizer, prompt, max_new_tokens=4) + "\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo three four\nfour\n"))
    assert generate.main([str(folder / "causal"), "--batch-size", "2", *options]) == 0
    assert capsys.readouterr().out == "".join(plain)

    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    assert generate.main([str(tmp_path), "one", "--system", "two", *options]) == 0
    asked = "<system>two<user>one<answer>"
    assert capsys.readouterr().out == by_transformers(model, tokenizer, asked, max_new_tokens=4) + "\n"
    assert generate.main([str(tmp_path), "one", "--plain", *options]) == 0
    assert capsys.readouterr().out == plain[0]


def test_adapters_in_peft_s_format(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False)
    Pipeline(str(folder / "causal"), 1, peft_config=config, device="cpu").save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.save_pretrained(tmp_path)
    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path)
    assert generate.main([str(tmp_path), "one", "--device", "cpu", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out == by_transformers(model.base_model.model, tokenizer, "one", max_new_tokens=4) + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "there is no tokenizer that can be read in 'nowhere'"),
        (["causal", "one", "--system", "two"], "--system is of a chat, and no chat template is used"),
        (["causal", "one", "--num-beans", "2"], "unrecognized arguments: --num-beans 2"),
        (["causal", "one", "--batch-size", "0"], "--batch-size is 0; it must be at least 1"),
    ],
)
def test_errors_are_one_line(
    words: list[str],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert generate.main([*words, "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
