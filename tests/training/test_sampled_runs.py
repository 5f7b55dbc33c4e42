"""Runs of the command, killed and started again, train on the same mini-batches, from memory and from a stream."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_gpipe.train import main

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

RECIPE = """
model:
  config: {model_type: t5, d_model: 16, d_kv: 8, num_heads: 2, num_layers: 1, num_decoder_layers: 1, d_ff: 16}
data:
  kind: jsonl
  path: FOLDER/{language}.jsonl
  languages: [large, small]
  temperature: 5.0
  max_source_tokens: 24
  max_target_tokens: 24
tokenizer: {vocab_size: 300}
pipeline: {num_stages: 2, num_micro_batches: 2, device: cpu}
training: {output_dir: FOLDER/out, max_steps: 30, batch_tokens: 100, batch_size: 8, logging_steps: 1, save_steps: 10}
evaluation: {max_examples: 2, max_new_tokens: 4, samples: 0}
"""

WORDS = "ein Schiff fährt langsam über das weite Meer"


def write(folder: Path) -> Path:
    for language, count in (("large", 300), ("small", 40)):
        rows = [
            {"source": f"{language} {number} {WORDS[: number % 40]}", "target": f"{number} {WORDS[-(number % 30) :]}"}
            for number in range(count)
        ]
        (folder / f"{language}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("FOLDER", str(folder)))
    return path


def lines(folder: Path) -> list[float]:
    path = folder / "out" / "metrics.jsonl"
    logs = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line["loss"] for line in logs if "loss" in line]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in (folder / "out").glob("*.safetensors") for name, tensor in load_file(file).items()}


def kill_after(words: list[str], folder: Path, steps: int) -> None:
    """Start the command and kill all of its processes once so many steps are logged."""
    with subprocess.Popen(
        words, cwd=REPOSITORY, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as launcher:
        try:
            deadline = time.monotonic() + 120
            while len(lines(folder)) < steps and launcher.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
            for process in (*map(int, children), launcher.pid):
                os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_a_killed_run_trains_on_the_same_mini_batches(streaming: str, tmp_path: Path) -> None:
    recipe = write(tmp_path)

    def words(folder: Path) -> list[str]:
        given = [f"data.streaming={streaming}", f"training.output_dir={folder / 'out'}"]
        if streaming == "true":
            given += ["data.counts={large: 300, small: 40}"]
        return [sys.executable, "-m", "hf_gpipe.train", str(recipe), *given]

    def finish(folder: Path) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            words(folder), cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
        )
        assert result.returncode == 0, result.stderr
        return result

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert "mini-batches of about 100 target tokens" in finish(whole).stdout
    kill_after(words(killed), killed, 13)
    assert not (killed / "out" / "metrics.json").exists(), "it had ended before it was killed"
    assert "resuming   from" in finish(killed).stdout
    assert lines(killed) == lines(whole)
    assert len(lines(whole)) == 30
    expected, found = weights(whole), weights(killed)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("override", ["data.temperature=2.0", "training.batch_tokens=90"])
def test_another_sampling_is_another_training(
    override: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path)
    words = [str(path), "pipeline.num_processes=1", "training.max_steps=1", "training.save_steps=1"]
    assert main(words) == 0
    assert main([*words, override]) == 2
    assert f"{override.partition('=')[0]} is" in capsys.readouterr().err
