"""Examples run as they stand: alone, and under accelerate launch; plain transformers loads the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, MarianMTModel

from hf_gpipe.data import train_tokenizer
from tests import forked_command
from tests.oracle import tiny_config

EXAMPLES = Path(__file__).parents[1] / "examples"
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
#: Options of `accelerate launch`.
LAUNCHED = [
    *("--cpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
]
FEW_STEPS = ["--use_cpu", "--max_steps", "2", "--per_device_train_batch_size", "4", "--report_to", "none"]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(WORDS * 20, 290, folder, model="bpe", character_coverage=1.0, target_tags=())
    return folder


def run(launcher: str, folder: Path, script: str, *arguments: str | Path, options: list[str]) -> str:
    """Run an example in a forked process, alone or by a launcher; what it printed."""
    words = [str(EXAMPLES / script), *map(str, arguments), *options, *FEW_STEPS]
    if launcher == "alone":
        process = forked_command.start_function(folder, forked_command.run_script, words)
    else:
        process = forked_command.start_function(folder, forked_command.accelerate, [*LAUNCHED, *words])
    process.join(240)
    assert process.exitcode == 0, (folder / "run.err").read_text()[-3000:]
    return (folder / "run.out").read_text()


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("launcher", ["alone", "accelerate"])
def test_translate(launcher: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = tiny_config(
        "marian",
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    model = MarianMTModel(config)
    model.generation_config.max_length = 8
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    pairs = write(tmp_path / "pairs.jsonl", [{"source": word, "target": word.upper()} for word in WORDS * 2])
    options = ["--num_stages", "2", "--eval_strategy", "no"]
    said = run(launcher, tmp_path, "translate.py", tmp_path / "model", pairs, tmp_path / "out", options=options)
    assert said.count("chrF ") == 1
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")


def test_pretrain_and_then_instruct(tokenizer_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text((" ".join(WORDS) + "\n") * 60)
    options = ["--num_stages", "2", "--save_steps", "1"]
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "unpadded")
    run("alone", tmp_path, "pretrain.py", tmp_path / "unpadded", text, tmp_path / "base", options=options)
    AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert (tmp_path / "base" / "checkpoint-2").is_dir()
    rows: list[dict[str, Any]] = [{"prompt": f"after {word} comes", "completion": word} for word in WORDS]
    rows += [
        {"conversations": [{"from": "human", "value": row["prompt"]}, {"from": "gpt", "value": "?"}]} for row in rows
    ]
    examples = write(tmp_path / "rows.jsonl", rows)
    options = ["--num_stages", "3", "--bf16"]
    run("alone", tmp_path, "instruct.py", tmp_path / "base", examples, tmp_path / "tuned", options=options)
    AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert "generation" in AutoTokenizer.from_pretrained(tmp_path / "tuned").chat_template
