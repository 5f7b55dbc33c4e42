"""Recipes that extend others: what is merged, where messages point, and chains that are refused."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_gpipe.errors import RecipeError
from hf_gpipe.recipe import load_recipe, parse_recipe
from hf_gpipe.recipe.extends import LONGEST_CHAIN, read_with_bases
from hf_gpipe.recipe.strict_yaml import write

BASE = """\
model:
  config:
    model_type: t5
    d_model: 64
    num_layers: 2
data:
  kind: cldr
  languages: [de, fr]
pipeline:
  num_stages: 2
  num_micro_batches: 8
training:
  output_dir: outputs/base
  learning_rate: 1.0e-3
"""


def files(folder: Path, **texts: str) -> Path:
    """Writes name.yaml for each text; the first one's path."""
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / f"{next(iter(texts))}.yaml"


def refused(path: Path, *overrides: str) -> str:
    """The message with which a recipe is refused."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------- what is merged


def test_a_recipe_states_its_differences_alone(tmp_path: Path) -> None:
    path = files(
        tmp_path,
        deep="""\
extends: base.yaml
model:
  config:
    num_layers: 8
data:
  languages: [es]
pipeline:
training:
  output_dir: outputs/deep
""",
        base=BASE,
    )
    recipe = load_recipe(path, ["training.learning_rate=0.5", "model.config.d_kv=16"])
    assert recipe.model.config == {"model_type": "t5", "d_model": 64, "num_layers": 8, "d_kv": 16}
    assert recipe.data.languages == ["es"], "a list replaces a list"
    assert recipe.data.kind == "cldr"
    assert (recipe.pipeline.num_stages, recipe.pipeline.num_micro_batches) == (2, 8), "an empty heading says nothing"
    assert recipe.training.output_dir == "outputs/deep"
    assert recipe.training.learning_rate == 0.5, "an override comes last"


def test_the_resolved_recipe_stands_alone(tmp_path: Path) -> None:
    recipe = load_recipe(files(tmp_path, deep="extends: base.yaml\n", base=BASE))
    assert recipe == parse_recipe(BASE)
    assert "extends" not in recipe.to_yaml()
    assert parse_recipe(recipe.to_yaml()) == recipe


def test_paths_are_relative_to_the_file_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    files(tmp_path, base=BASE, middle="extends: ./base.yaml\npipeline: {num_stages: 3}\n")
    files(tmp_path / "inner", top="extends: ../middle.yaml\npipeline: {num_micro_batches: 5}\n")
    monkeypatch.chdir(tmp_path.parent)
    pipeline = load_recipe(f"{tmp_path.name}/inner/top.yaml").pipeline
    assert (pipeline.num_stages, pipeline.num_micro_batches) == (3, 5)


def test_null_below_a_section_is_a_value(tmp_path: Path) -> None:
    base = BASE.replace("d_model: 64", "d_model: 64\n    rope: {type: linear}")
    recipe = load_recipe(files(tmp_path, top="extends: base.yaml\nmodel: {config: {rope: null}}\n", base=base))
    assert recipe.model.config["rope"] is None


leaves = st.none() | st.integers() | st.text("abc", max_size=3) | st.lists(st.integers(), max_size=2)
mappings = st.recursive(
    st.dictionaries(st.sampled_from("abcd"), leaves, max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), leaves | inner, max_size=3),
    max_leaves=8,
)
sections = st.dictionaries(st.sampled_from(["one", "two", "three"]), mappings, max_size=3)


def merged(base: Mapping[Any, Any], own: Mapping[Any, Any]) -> dict[Any, Any]:
    """The definition, as short as it can be said."""
    result = dict(copy.deepcopy(base))
    for key, value in own.items():
        both = isinstance(result.get(key), dict) and isinstance(value, dict)
        result[key] = merged(result[key], value) if both else value
    return result


def leaf_paths(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Every value that is no mapping with keys, by its path."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    return {at: leaf for key, inner in value.items() for at, leaf in leaf_paths(inner, (*path, key)).items()}


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(sections, min_size=2, max_size=4))
def test_a_chain_is_its_files_merged_in_turn(tmp_path: Path, chain: list[dict[Any, Any]]) -> None:
    """And each value's place is the last file that gave it."""
    for number, data in enumerate(chain):
        extends = {"extends": f"{number - 1}.yaml"} if number else {}
        (tmp_path / f"{number}.yaml").write_text(write(extends | data), encoding="utf-8")
    found, locations = read_with_bases(tmp_path / f"{len(chain) - 1}.yaml")
    expected: dict[Any, Any] = {}
    for data in chain:
        expected = merged(expected, data)
    assert found == expected
    for path in leaf_paths(expected):
        if not path:
            continue
        place = locations.of(path)
        file = int(Path(place.partition(", line ")[0]).stem)
        givers = [number for number, data in enumerate(chain) if path in leaf_paths(data)]
        assert file == givers[-1], (path, place)


# ---------------------------------------------------------------------- where a message points


def test_an_error_names_the_file_and_the_line_that_gave_the_value(tmp_path: Path) -> None:
    base = BASE.replace("num_micro_batches: 8", "num_micro_batches: none")
    top = files(tmp_path, top="extends: base.yaml\npipeline:\n  num_stages: two\n", base=base)
    assert refused(top).startswith(f"{top}, line 3: pipeline.num_stages: found 'two'")
    top.write_text("extends: base.yaml\npipeline:\n  num_stages: 3\n")
    assert refused(top).startswith(f"{tmp_path / 'base.yaml'}, line 11: pipeline.num_micro_batches: found 'none'")
    assert refused(top, "pipeline.num_micro_batches=x").startswith("override 'pipeline.num_micro_batches=x'")
    top.write_text("extends: base.yaml\npipeline: {num_micro_batches: 1}\ntrainer: {seed: 1}\n")
    assert refused(top).startswith(f"{top}, line 3: trainer is not a key of a recipe")
    files(tmp_path, base=BASE + "  seeed: 3\n")
    assert refused(files(tmp_path, top="extends: base.yaml\n")).startswith(f"{tmp_path / 'base.yaml'}, line 15: ")


def test_a_line_of_a_list_that_was_replaced_is_forgotten(tmp_path: Path) -> None:
    base = BASE.replace("[de, fr]", "\n    - de\n    - {a: b}")
    top = files(tmp_path, top="extends: base.yaml\ndata:\n  languages: [de, {a: 3}]\n", base=base)
    assert refused(top).startswith(f"{top}, line 3: data.languages[1]: found")


# ---------------------------------------------------------------------- what is refused


def test_files_that_are_missing_or_unreadable(tmp_path: Path) -> None:
    top = files(tmp_path, top="# a comment\nextends: absent.yaml\n" + BASE)
    assert refused(top).startswith(f"{top}, line 2: extends: {tmp_path / 'absent.yaml'} does not exist")
    top = files(tmp_path, top="extends: .\n" + BASE)
    assert "extends:" in refused(top)
    (tmp_path / "latin.yaml").write_bytes("model: {path: é}".encode("latin-1"))
    top = files(tmp_path, top="extends: latin.yaml\n")
    assert "latin.yaml is not UTF-8" in refused(top)
    assert refused(files(tmp_path, top="extends: list.yaml\n", list="[1]")).startswith(f"{tmp_path / 'list.yaml'}: a")
    assert refused(files(tmp_path, top="extends: bad.yaml\n", bad="a: [1")).startswith(f"{tmp_path / 'bad.yaml'}, line")


@pytest.mark.parametrize("value", ["3", "[base.yaml]", "", "null", "' '", '"nul\\0byte.yaml"', "/etc/passwd"])
def test_what_is_no_file_s_name(value: str, tmp_path: Path) -> None:
    message = refused(files(tmp_path, top=f"extends: {value}\n{BASE}", base=BASE))
    assert "line 1: extends:" in message
    assert "root:" not in message


def test_circles(tmp_path: Path) -> None:
    one = files(tmp_path, one="extends: two.yaml\n", two=f"extends: ../{tmp_path.name}/one.yaml\n" + BASE)
    message = refused(one)
    assert message.startswith(f"{tmp_path / 'two.yaml'}, line 1: extends: the recipes extend each other in a circle")
    assert "one.yaml -> " in message
    assert "circle" in refused(files(tmp_path, self="extends: self.yaml\n"))
    (tmp_path / "link.yaml").symlink_to(tmp_path / "linked.yaml")
    assert "circle" in refused(files(tmp_path, linked="extends: link.yaml\n"))


def test_a_chain_has_an_end(tmp_path: Path) -> None:
    files(tmp_path, r1=BASE, **{f"r{n}": f"extends: r{n - 1}.yaml\n" for n in range(2, LONGEST_CHAIN + 2)})
    assert load_recipe(tmp_path / f"r{LONGEST_CHAIN}.yaml") == parse_recipe(BASE)
    message = refused(tmp_path / f"r{LONGEST_CHAIN + 1}.yaml")
    assert f"{LONGEST_CHAIN + 1} recipes extend each other in a row" in message
    assert f"at most {LONGEST_CHAIN} are allowed" in message


def test_a_text_and_an_override_cannot_extend(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="text, line 1: extends is allowed only at the top of a recipe's file"):
        parse_recipe("extends: base.yaml\n" + BASE, source="text")
    top = files(tmp_path, top=BASE)
    assert refused(top, "extends=base.yaml").startswith("override 'extends=base.yaml': extends is allowed only")
    assert "pipeline.extends is not a key" in refused(top, "pipeline.extends=base.yaml")


def test_a_file_that_changes_the_kind_drops_what_the_new_kind_does_not_use(tmp_path: Path) -> None:
    base = BASE.replace("languages: [de, fr]", "languages: [de, fr]\n  max_number: 5\n  test_fraction: 0.5")
    middle = "extends: base.yaml\ndata:\n  kind: jsonl\n  path: a.jsonl\n"
    top = files(tmp_path, top="extends: middle.yaml\ndata: {source_field: src}\n", middle=middle, base=base)
    data = load_recipe(top).data
    assert (data.kind, data.languages, data.max_number, data.test_fraction) == ("jsonl", ["de", "fr"], 999, 0.5)
    assert data.source_field == "src"
    top.write_text("extends: middle.yaml\ndata: {max_number: 6}\n")
    assert refused(top).startswith(f"{top}, line 2: data.max_number is 6 (a whole number) and data.kind is jsonl")


def test_nothing_of_the_base_is_lost_or_invented(tmp_path: Path) -> None:
    top = load_recipe(files(tmp_path, top="extends: base.yaml\ntraining: {seed: 3}\n", base=BASE))
    before = parse_recipe(BASE).values()
    assert {key for key, value in top.values().items() if before[key] != value} == {("training", "seed")}
