from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_gpipe.errors import RecipeError, UserError
from hf_gpipe.recipe import parse_recipe
from hf_gpipe.settings.sizes import UNITS, read_bytes
from hf_gpipe.text import size_text

RECIPE = "model: {config: {model_type: marian}}\ndata: {kind: cldr, languages: [de]}\ntraining: {output_dir: out}\n"


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * 2**30), ("80 GB", 80 * 10**9), ("1.5kB", 1500), ("512b", 512), (".5 tib", 2**39), ("16gib", 2**34)],
)
def test_sizes_that_are_understood(text: str, size: int) -> None:
    assert read_bytes(text, "--memory") == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("80", "--memory is '80', without a unit; write for example 80GiB"),
        ("80G", "the unit 'G' is not one of B, kB"),
        ("much", "is not a size; write a number and a unit, such as 80GiB"),
        ("", "is not a size"),
        ("-1GiB", "is not a size"),
        ("0GiB", "it must be above 0"),
        (".1B", "it must be at least one byte"),
    ],
)
def test_sizes_that_are_not(text: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        read_bytes(text, "--memory")


@given(st.integers(1, 2**50), st.sampled_from(sorted(UNITS)))
def test_a_size_is_shown_to_three_digits(number: int, unit: str) -> None:
    size = number * UNITS[unit]
    assert read_bytes(size_text(size), "x") == pytest.approx(size, rel=6e-3)


def test_a_recipe_checks_its_memory() -> None:
    assert parse_recipe(RECIPE, ["pipeline.memory=80GiB"]).pipeline.memory == "80GiB"
    with pytest.raises(RecipeError, match=r"pipeline.memory is '80', without a unit"):
        parse_recipe(RECIPE, ["pipeline.memory='80'"])


def test_what_the_planner_settles_may_be_auto() -> None:
    pipeline = parse_recipe(
        RECIPE,
        [f"pipeline.{key}=auto" for key in ("num_micro_batches", "schedule", "recompute", "partition")],
    ).pipeline
    assert (pipeline.num_micro_batches, pipeline.schedule, pipeline.recompute, pipeline.partition) == ("auto",) * 4
    with pytest.raises(RecipeError, match="num_micro_batches"):
        parse_recipe(RECIPE, ["pipeline.num_micro_batches=many"])
    with pytest.raises(RecipeError, match="did you mean 'flops'"):
        parse_recipe(RECIPE, ["pipeline.partition=flop"])
