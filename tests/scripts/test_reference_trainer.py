"""scripts/reference_trainer.py: a run's validation losses are those of plain Seq2SeqTrainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import reference_trainer

from hf_gpipe.train import main

pytestmark = pytest.mark.usefixtures("undo_the_command_s_settings", "no_prediction")

RECIPE = """
model: {config: {model_type: t5, d_model: 16, d_kv: 8, d_ff: 32, num_layers: 1, num_decoder_layers: 1, num_heads: 2,
                 dropout_rate: 0.0, feed_forward_proj: relu}}
data: {kind: cldr, languages: [de, fr], templates: [weekday, month_day], examples_per_language: 200,
       validation_fraction: 0.1, test_fraction: 0.1}
tokenizer: {vocab_size: 320}
pipeline: {num_stages: 2, num_micro_batches: 2, num_processes: 1, device: cpu,
  schedule: gpipe, partition: count, recompute: stage}
training: {output_dir: OUTPUT, max_steps: 6, batch_tokens: 60, learning_rate: 1.0e-3, warmup_steps: 2,
           lr_scheduler_type: warmup_stable_decay, decay_steps: 2, eval_steps: 2}
evaluation: {max_examples: 2, max_new_tokens: 2, samples: 0}
"""


def test_the_losses_are_seq2seq_trainer_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, folder = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RECIPE.replace("OUTPUT", str(folder)))
    assert main([str(recipe)]) == 0
    capsys.readouterr()
    assert reference_trainer.main([str(folder), "--tolerance", "1e-4"]) == 0
    out = capsys.readouterr().out
    rows = [line.split("|")[1:4] for line in out.splitlines() if line.startswith("| ")][2:]
    assert [row[0].strip() for row in rows] == ["2", "4", "6"], "the rate falls after the fourth update"
    assert [row[1].strip() for row in rows] == [row[2].strip() for row in rows]
    assert reference_trainer.main([str(folder), "--tolerance", "-1"]) == 1
    assert reference_trainer.main([str(tmp_path)]) == 2
    assert "metrics.jsonl is missing" in capsys.readouterr().err
    of_run = folder / "recipe.yaml"
    of_run.write_text(of_run.read_text().replace("dropout_rate: 0.0", "dropout_rate: 0.1"))
    assert reference_trainer.main([str(folder)]) == 2
    assert "dropout_rate = 0.1" in capsys.readouterr().err
