"""YAML read strictly: what is a number, what is given twice, and where a mistake is."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hf_gpipe.errors import RecipeError
from hf_gpipe.recipe.strict_yaml import read, write


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-3", 2e-3),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("1_000", 1000),
        ("-3", -3),
        ("true", True),
        ("no", "no"),
        ("on", "on"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2024-01-31", "2024-01-31"),
        ("'2e-3'", "2e-3"),
        ("<<", "<<"),
        ("~", None),
        ("", None),
        ("[1, {a: null}]", [1, {"a": None}]),
        ("{a: &x [1], b: *x}", {"a": [1], "b": [1]}),
    ],
)
def test_a_value_reads_as_it_looks(text: str, value: Any) -> None:
    found, _ = read(text, "text")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text", ["no", "2e-3", "1E5", "010", "1_0", "null", "", "a: b", "2024-01-31", "<<", "- x", "=", "é"]
)
def test_a_string_that_looks_like_something_else_stays_a_string(text: str) -> None:
    assert read(write({"key": text}), "text")[0] == {"key": text}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "text, line 3, column 1: the key 'a' is given twice, first on line 1."),
        ("x:\n  a: 1\n  a: 1", "text, line 3, column 3: the key 'a' is given twice, first on line 2."),
        ("a: [1", "text, line 1, column 6: the YAML does not parse"),
        ("\ta: 1", "text, line 1, column 1: the YAML does not parse"),
        ("a: 1\n--- \nb: 2", "the YAML does not parse"),
        ("a: !!python/object/apply:os.system [ls]", "text, line 1, column 4: tags such as"),
        ("a: !!int abc", "tags such as"),
        ("&x [*x]", "an alias contains itself"),
        ("? [1]\n: 2", "a key is a list or a mapping"),
        ("[" * 5000, "more than 50 levels"),
        ("9" * 5000, "the YAML cannot be read"),
        ("a: \x01", "the YAML cannot be read"),
    ],
)
def test_what_a_recipe_may_not_hold_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(text, "text")
    assert message in str(caught.value)


def test_a_place_is_the_line_of_the_nearest_value_around() -> None:
    _, locations = read("a:\n  b: 1\n  c: [1,\n    {d: 2}]", "text")
    assert locations.of(("a", "b")) == "text, line 2"
    assert locations.of(("a", "c", 1, "d")) == "text, line 4"
    assert locations.of(("a", "absent")) == "text, line 1"
    assert locations.of(("absent",)) == "text"


def test_what_an_override_replaces_has_the_overrides_place() -> None:
    _, locations = read("a:\n  b: 1", "text")
    locations.replace(("a",), "override")
    assert locations.of(("a", "b")) == "override"


def test_aliases_that_stand_for_billions_of_values_are_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    start = time.monotonic()
    with pytest.raises(RecipeError, match="more than 20000 values, those that aliases repeat included"):
        read("\n".join(lines), "recipe")
    mappings = ["a0: &a0 {x: 1, y: 2}"]
    mappings += [f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 40)]
    with pytest.raises(RecipeError, match="more than 20000 values"):
        read("\n".join(mappings), "recipe")
    assert time.monotonic() - start < 5


def test_text_that_is_too_long_is_refused() -> None:
    with pytest.raises(RecipeError, match="262145 characters, and a recipe has at most 262144"):
        read("a" * 262145, "recipe")
