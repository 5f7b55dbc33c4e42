"""scripts/rehearse_paper.py: a recipe of the paper's runs as it stands, here with a model that is smaller still."""

from __future__ import annotations

from pathlib import Path

import pytest
import rehearse_paper
from translation_scaling import execute

from hf_gpipe.recipe import load_recipe
from hf_gpipe.recipe.transformer import TransformerSize
from tests.forked_command import Training


def test_the_deepest_recipe_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "start", Training)
    words = ["model.config.d_model=16", 'model.transformer="T(2, 16, 1)"', "pipeline.num_stages=4"]
    assert rehearse_paper.main(["paper-6b", "--steps", "2", "--output", str(tmp_path), *words]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "paper-6b" in line)
    assert [word.strip() for word in row.split("|")[3:5]] == ["4", "2"]
    assert rehearse_paper.main(["paper-7b"]) == 2
    assert "'paper-7b' is none of the recipes paper-400m" in capsys.readouterr().err
    assert rehearse_paper.main(["paper-6b", "--output", str(tmp_path), "model.config.d_model=17"]) == 1
    assert "paper-6b ended with exit code 2" in capsys.readouterr().err


def test_a_rehearsal_has_the_layers_of_its_recipe(tmp_path: Path) -> None:
    assert rehearse_paper.SIZES.keys() == {path.stem for path in rehearse_paper.RECIPES.glob("paper-*.yaml")}
    for name in rehearse_paper.SIZES:
        path = rehearse_paper.RECIPES / f"{name}.yaml"
        own = load_recipe(path)
        small = load_recipe(path, rehearse_paper.overrides(name, 50, tmp_path, tmp_path))
        sizes = [TransformerSize.parse(recipe.model.transformer) for recipe in (own, small)]
        assert sizes[0].num_layers == sizes[1].num_layers
        for key in ("num_stages", "schedule", "recompute"):
            assert getattr(own.pipeline, key) == getattr(small.pipeline, key)
        for key in ("gradient_accumulation_steps", "bf16", "optim", "lr_scheduler_type", "logit_clipping"):
            assert getattr(own.training, key) == getattr(small.training, key)
        assert own.data.streaming
        assert small.data.streaming
