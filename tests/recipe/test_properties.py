"""Properties of recipes over many generated ones."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hf_gpipe.errors import RecipeError
from hf_gpipe.recipe import parse_recipe
from hf_gpipe.recipe.fields import all_keys
from hf_gpipe.recipe.strict_yaml import read, write
from hf_gpipe.settings.section import Key, dotted

BASE = {
    "model": {"config": {"model_type": "marian"}},
    "data": {"kind": "cldr", "languages": ["de"]},
    "training": {"output_dir": "out"},
}
KEYS = {(section, key.name): key for section, key in all_keys()}
Path = tuple[str, str]
#: A file alone cannot say so.
TRUST = ["model.trust_remote_code=true"]

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


def fitting(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a JSON schema allows."""
    if "anyOf" in schema:
        return st.one_of([fitting(one) for one in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    match schema["type"]:
        case "array":
            return st.lists(fitting(schema["items"]), max_size=3)
        case "object":
            return st.dictionaries(words, values, max_size=3)
        case "integer":
            return st.integers(schema.get("minimum", 0), schema.get("maximum", 10**9))
        case "number":
            return st.floats(0.001, 0.999) if schema.get("minimum", 0) < 1 else st.floats(1, 2)
        case "string" if "maxLength" in schema:
            return st.sampled_from(",;\t")
        case "string":
            return words.filter(str.strip)
    return {"null": st.none(), "boolean": st.booleans()}[schema["type"]]


def fits(value: Any, key: Key) -> bool:
    """Whether the type of a key allows a value, said a second time."""

    def matches(value: Any, schema: dict[str, Any]) -> bool:
        if "anyOf" in schema:
            return any(matches(value, one) for one in schema["anyOf"])
        if "enum" in schema or "const" in schema:
            return value in schema.get("enum", [schema.get("const")])
        types = {"null": type(None), "boolean": bool, "integer": int, "number": (int, float), "string": str}
        types |= {"array": list, "object": dict}
        if not isinstance(value, types[schema["type"]]):
            return False
        if isinstance(value, bool) and schema["type"] != "boolean":
            return False
        if isinstance(value, list):
            return all(matches(one, schema["items"]) for one in value)
        if isinstance(value, str):
            length = schema.get("maxLength")
            return len(value) == length if length is not None else bool("pattern" not in schema or value.strip())
        if not isinstance(value, int | float) or isinstance(value, bool):
            return True
        return (
            value >= schema.get("minimum", value)
            and value <= schema.get("maximum", value)
            and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
            and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        )

    return matches(value, key.schema)


def with_value(key: Path, value: Any) -> dict[Any, Any]:
    """BASE with `value` at `key`."""
    section, name = key
    return {**BASE, section: {**BASE.get(section, {}), name: value}}


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_a_recipe_that_is_accepted_is_the_same_after_writing_and_reading(data: st.DataObject) -> None:
    recipe = None
    for key in data.draw(st.lists(st.sampled_from(list(KEYS)), min_size=1, max_size=4)):
        value = data.draw(fitting(KEYS[key].schema), label=dotted(key))
        with contextlib.suppress(RecipeError):  # the value may contradict another field's default
            recipe = parse_recipe(
                write(with_value(key, value)), TRUST if key[1] == "trust_remote_code" and value else ()
            )
            found = getattr(getattr(recipe, key[0]), key[1])
            # A path may begin with ~, which is read as the home directory.
            home = os.path.expanduser(value) if isinstance(value, str) else value
            assert (list(found) if isinstance(found, tuple) else found) in (value, home)
    if recipe is not None:
        assert parse_recipe(recipe.to_yaml(), TRUST if recipe.model.trust_remote_code else ()) == recipe


@settings(deadline=None, max_examples=100)
@given(values)
def test_yaml_gives_back_what_was_written(value: Any) -> None:
    again, _ = read(write({"value": value}), "text")
    assert again == {"value": value}


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(list(KEYS)), values)
@example(("pipeline", "zero"), "x")  # no text is near to a number
@example(("pipeline", "zero"), True)
def test_any_value_at_any_key_is_accepted_or_refused_by_name(key: Path, value: Any) -> None:
    # null stands for the default, which may contradict other keys.
    if fits(value, KEYS[key]) or (value is None and not KEYS[key].is_required):
        with contextlib.suppress(RecipeError):
            parse_recipe(write(with_value(key, value)))
    else:
        with pytest.raises(RecipeError) as caught:
            parse_recipe(write(with_value(key, value)))
        assert dotted(key) in str(caught.value)
        assert "expected" in str(caught.value)


@settings(deadline=None, max_examples=100)
@given(st.text(st.characters(codec="utf-8"), max_size=60), st.lists(st.text(max_size=30), max_size=2))
def test_any_text_and_any_override_end_in_a_recipe_error(text: str, overrides: list[str]) -> None:
    with pytest.raises(RecipeError):
        parse_recipe(text, overrides)


@settings(deadline=None, max_examples=100)
@given(st.text("{}[],:-&*!|>'\"%@`#?~ \n\tmodeltraing0123456789.e_", max_size=80))
def test_text_made_of_yaml_signs_ends_in_a_recipe_error(text: str) -> None:
    with pytest.raises(RecipeError):
        parse_recipe(text)
    with contextlib.suppress(RecipeError):
        parse_recipe(write(BASE), [f"model.config.x={text}"])


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([key for key in KEYS if len(str(key[-1])) >= 5]), st.data())
def test_a_misspelt_key_gets_a_hint_to_a_key_that_exists(key: Path, data: st.DataObject) -> None:
    section, name = str(key[0]), str(key[1])
    at = data.draw(st.integers(0, len(name) - 1))
    misspelt = name[:at] + data.draw(st.sampled_from(["", "q"])) + name[at + 1 :]
    # Some keys are one letter from another: devices and device.
    assume((section, misspelt) not in KEYS)
    with pytest.raises(RecipeError, match="is not a key of a recipe; did you mean") as caught:
        parse_recipe(write(BASE), [f"{section}.{misspelt}=1"])
    hint = str(caught.value).partition("did you mean")[2]
    assert set(re.findall("'([^']+)'", hint)) <= {dotted(known) for known in KEYS}
    assert f"'{section}." in hint
