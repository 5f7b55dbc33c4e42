"""Properties of recipes over many generated ones."""

from __future__ import annotations

import contextlib
import re
from dataclasses import asdict
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hf_gpipe.errors import RecipeError
from hf_gpipe.recipe import Recipe, parse_recipe
from hf_gpipe.recipe.build import KeyPath, dotted, leaf_keys
from hf_gpipe.recipe.strict_yaml import read, write
from hf_gpipe.recipe.typed import MismatchError, OneOf, convert

BASE = {
    "model": {"config": {"model_type": "marian"}},
    "data": {"kind": "cldr", "languages": ["de"]},
    "training": {"output_dir": "out"},
}
KEYS = leaf_keys(Recipe)

words = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12) | st.sampled_from(
    [
        "no",
        "2e-3",
        "010",
        "null",
        "~",
        "1:30",
        "2024-01-31",
        "<<",
        "count",
        "gpipe",
        "---",
        "a: b",
        "[",
        "*x",
        "&x",
        "!t",
    ]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3))


def annotation(key: KeyPath) -> Any:
    """The type of the field at `key`."""
    expected: Any = Recipe
    for name in key:
        expected = get_type_hints(expected, include_extras=True)[name]
    return expected


def fitting(expected: Any) -> st.SearchStrategy[Any]:
    """Values that an annotation allows."""
    if get_origin(expected) is Annotated:
        base, *constraints = get_args(expected)
        for constraint in constraints:
            if isinstance(constraint, OneOf):
                return st.sampled_from(constraint.names)
        return fitting(base).filter(lambda value: all(constraint.allows(value) for constraint in constraints))
    if get_origin(expected) is Literal:
        return st.sampled_from(get_args(expected))
    if get_origin(expected) is list:
        return st.lists(fitting(get_args(expected)[0]), max_size=3)
    if get_origin(expected) is dict:
        return st.dictionaries(words, values, max_size=3)
    if get_args(expected):
        return st.one_of([fitting(alternative) for alternative in get_args(expected)])
    return {
        NoneType: st.none(),
        bool: st.booleans(),
        int: st.integers(0, 10**9),
        float: st.floats(0, 2, allow_subnormal=False),
        str: words,
    }[expected]


def with_value(key: KeyPath, value: Any) -> dict[Any, Any]:
    """BASE with `value` at `key`."""
    section, name = key
    return {**BASE, section: {**BASE.get(section, {}), name: value}}


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_recipe_that_is_accepted_is_the_same_after_writing_and_reading(data: st.DataObject) -> None:
    recipe = None
    for key in data.draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)):
        value = data.draw(fitting(annotation(key)), label=dotted(key))
        with contextlib.suppress(RecipeError):  # the value may contradict another field's default
            recipe = parse_recipe(write(with_value(key, value)))
            assert asdict(recipe)[key[0]][key[1]] == value
    if recipe is not None:
        assert parse_recipe(recipe.to_yaml()) == recipe


@settings(deadline=None, max_examples=200)
@given(values)
def test_yaml_gives_back_what_was_written(value: Any) -> None:
    again, _ = read(write({"value": value}), "text")
    assert again == {"value": value}


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(KEYS), values)
def test_any_value_at_any_key_is_accepted_or_refused_by_name(key: KeyPath, value: Any) -> None:
    try:
        convert(value, annotation(key))
    except MismatchError:
        with pytest.raises(RecipeError) as caught:
            parse_recipe(write(with_value(key, value)))
        assert dotted(key) in str(caught.value)
        assert "expected" in str(caught.value)
    else:
        with contextlib.suppress(RecipeError):
            parse_recipe(write(with_value(key, value)))


@settings(deadline=None, max_examples=200)
@given(st.text(st.characters(codec="utf-8"), max_size=60), st.lists(st.text(max_size=30), max_size=2))
def test_any_text_and_any_override_end_in_a_recipe_error(text: str, overrides: list[str]) -> None:
    with pytest.raises(RecipeError):
        parse_recipe(text, overrides)


@settings(deadline=None, max_examples=200)
@given(st.text("{}[],:-&*!|>'\"%@`#?~ \n\tmodeltraing0123456789.e_", max_size=80))
def test_text_made_of_yaml_signs_ends_in_a_recipe_error(text: str) -> None:
    with pytest.raises(RecipeError):
        parse_recipe(text)
    with contextlib.suppress(RecipeError):
        parse_recipe(write(BASE), [f"model.config.x={text}"])


@settings(deadline=None, max_examples=100)
@given(st.sampled_from([key for key in KEYS if len(str(key[-1])) >= 5]), st.data())
def test_a_misspelt_key_gets_a_hint_to_a_key_that_exists(key: KeyPath, data: st.DataObject) -> None:
    section, name = str(key[0]), str(key[1])
    at = data.draw(st.integers(0, len(name) - 1))
    misspelt = name[:at] + data.draw(st.sampled_from(["", "q"])) + name[at + 1 :]
    # Some keys are one letter from another: devices and device.
    assume((section, misspelt) not in {(str(known[0]), str(known[1])) for known in KEYS if len(known) > 1})
    with pytest.raises(RecipeError, match="is not a key of a recipe; did you mean") as caught:
        parse_recipe(write(BASE), [f"{section}.{misspelt}=1"])
    hint = str(caught.value).partition("did you mean")[2]
    assert set(re.findall("'([^']+)'", hint)) <= {dotted(known) for known in KEYS}
    assert f"'{section}." in hint
