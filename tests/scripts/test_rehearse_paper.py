"""scripts/rehearse_paper.py: a recipe of the paper's runs as it stands, here with a model that is smaller still."""

from __future__ import annotations

from pathlib import Path

import pytest
import rehearse_paper
from translation_scaling import execute

from hf_gpipe.recipe import load_recipe
from hf_gpipe.recipe.transformer import TransformerSize
from tests.forked_command import Training


def test_the_deepest_recipe_and_one_of_one_language_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "start", Training)
    words = ["model.config.d_model=16", 'model.transformer="T(2, 16, 1)"', "pipeline.num_stages=4"]
    words += ["pipeline.partition=count"]
    names = ["paper-6b", "paper-batch-260k"]
    assert rehearse_paper.main([*names, "--steps", "2", "--output", str(tmp_path), *words]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| paper-")]
    assert [[word.strip() for word in (row[1], *row[3:5])] for row in rows] == [[name, "4", "2"] for name in names]
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
