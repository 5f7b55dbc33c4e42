"""A new key of the engine, and a new mode, are declared once: all that reads recipes and configurations knows them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest
from pydantic import Field
from transformers import HfArgumentParser

from hf_gpipe import PipelineTrainingArguments
from hf_gpipe.errors import RecipeError, UserError
from hf_gpipe.recipe import Recipe, parse_recipe, section_help
from hf_gpipe.recipe.fields import SECTIONS
from hf_gpipe.settings.mode import Keys, Mode
from hf_gpipe.settings.pipeline import PipelineConfig
from hf_gpipe.settings.section import keys_of
from hf_gpipe.training.arguments import with_keys_of

RECIPE = """\
model: {config: {model_type: llama}}
data: {kind: text, path: texts}
training: {output_dir: out}
"""


class WithKey(PipelineConfig):
    """A configuration with one more key."""

    warm_links: Annotated[int, Field(ge=1)] | None = None
    """Messages that are sent before training; null: none."""


class Rests(Mode):
    """Steps after which all processes rest."""

    excludes: ClassVar[dict[str, str]] = {"asynchronous": ": its stages never stand still"}

    rest_steps: Annotated[int, Field(ge=0)] = 0
    """Number of steps between two rests; 0: none."""

    rest_seconds: float = 1.0
    """Length of a rest."""

    def check(self, keys: Keys) -> None:
        if self.is_on(keys) and keys["device"] == "cuda":
            raise UserError("rest_steps is given and device is cuda; leave rest_steps out.")


class WithMode(PipelineConfig):
    """A configuration with one more mode."""

    rests: Rests = Rests()


def recipe_of(config: type, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Recipe:
    monkeypatch.setitem(SECTIONS, "pipeline", config)
    return parse_recipe(RECIPE, overrides, source="r.yaml")


def test_a_new_key_is_one_field(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(WithKey, monkeypatch, "pipeline.warm_links=3")
    assert recipe.pipeline.warm_links == recipe.pipeline.replace(num_stages=2).warm_links == 3
    assert "warm_links: 3" in recipe.to_yaml()
    assert "pipeline.warm_links: a whole number of at least 1 or null; default: null\n" in section_help("pipeline")
    assert recipe.pipeline.of_plan["warm_links"] == 3
    with pytest.raises(RecipeError, match=re.escape("pipeline.warm_links: found 0 (a whole number), expected a whole")):
        recipe_of(WithKey, monkeypatch, "pipeline.warm_links=0")
    assert WithKey.model_validate_json(recipe.pipeline.model_dump_json()) == recipe.pipeline


def test_a_new_key_is_an_argument() -> None:
    """Each argument repeated the type, the default and the help of its key by hand."""

    @dataclass
    @with_keys_of(WithKey, but=("device", "devices", "speeds"))
    class Arguments(PipelineTrainingArguments):
        pass

    parser = HfArgumentParser(Arguments)
    assert "Messages that are sent before training; None: none." in parser.format_help()
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", "out", "--use_cpu", "True", "--warm_links", "3"])
    assert (args.warm_links, Arguments("out").warm_links) == (3, None)


def test_a_new_mode_is_one_class_with_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(WithMode, monkeypatch, "pipeline.rest_steps=5")
    config = recipe.pipeline
    assert config.rests == Rests(rest_steps=5)
    assert config.rest_steps == config.replace(rest_seconds=2.0).rests.rest_steps == 5
    assert config == WithMode(rests=Rests(rest_steps=5)) == WithMode(**config.values())
    assert "rest_steps: 5" in recipe.to_yaml()
    assert "pipeline.rest_steps: a whole number of at least 0; default: 0\n" in section_help("pipeline")
    assert WithMode.model_validate_json(config.model_dump_json()) == config
    for values, message in (
        ({"rest_steps": -1}, "pipeline.rest_steps: found -1 (a whole number), expected a whole number of at least 0"),
        ({"rest_step": 1}, "pipeline.rest_step is not a key of a recipe; did you mean 'pipeline.rest_steps'?"),
        ({"rest_steps": 1, "device": "cuda"}, "pipeline.rest_steps is given and device is cuda; leave rest_steps out."),
        (
            {"rest_steps": 1, "schedule": "pipedream"},
            "pipeline.schedule is pipedream and rest_steps is 1, which do not go together: its stages never stand "
            "still; leave rest_steps out, or use another schedule, such as 1f1b.",
        ),
    ):
        with pytest.raises(RecipeError, match=re.escape(message)):
            recipe_of(WithMode, monkeypatch, *(f"pipeline.{name}={value}" for name, value in values.items()))


def test_the_keys_of_a_configuration_are_those_of_its_fields_and_modes() -> None:
    config = PipelineConfig(2, sequence_chunks=2, zero=1, replicas=2)
    assert list(config.values()) == list(keys_of(PipelineConfig))
    assert config.sequence_chunks == config.chunks.sequence_chunks == 2
    assert PipelineConfig(**config.values()) == PipelineConfig.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(AttributeError, match="sequence_chunk"):
        config.sequence_chunk  # noqa: B018  # what is tested
