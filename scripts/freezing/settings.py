"""The requests of recipes, pages and scripts: resolved recipes, model specifications, pipelines, arguments.

Recipes are those of recipes/, those that commands on pages name with their overrides, and YAML blocks of pages that are
recipes. Arguments are those of each recipe, and of each call in a Python block or an example whose values are literals.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import hf_gpipe
from hf_gpipe.errors import UserError
from hf_gpipe.from_recipe.checks import loss_of, workload_of
from hf_gpipe.from_recipe.model import companion_of, model_config, spec_of
from hf_gpipe.from_recipe.trainer import arguments_of
from hf_gpipe.from_recipe.workload import plan_inputs
from hf_gpipe.recipe import Recipe, load_recipe, parse_recipe, recipe_help, section_help
from hf_gpipe.recipe.fields import SECTIONS
from scripts.freezing.plans import ABSENT, model_of
from scripts.freezing.results import Entries, exact

FILE = "settings.txt.xz"
tolerance_of = exact

ROOT = Path(__file__).resolve().parents[2]
_CONFIGS = [name for name in hf_gpipe.__all__ if name.endswith(("Config", "Arguments")) and name != "PipelineConfig"]
#: What a block of a page that shows a part of a recipe lacks.
_LACKING = {
    "model": "{config: {model_type: llama}}",
    "data": "{kind: text, path: texts}",
    "training": "{output_dir: out, max_steps: 10, batch_size: 8}",
    "pipeline": "{num_stages: 2}",
}
_COMMAND = re.compile(r"(?:-m hf_gpipe(?:\.train| plan| train| check)|hf-gpipe (?:plan|train|check)) (.*)")


def names() -> list[str]:
    """The names of all entries."""
    return list(_cases())


def entries(wanted: Sequence[str]) -> Entries:
    """Their texts, or of errors in their place."""
    return {name: _told(_cases()[name]) for name in wanted}


def _told(make: Callable[[], str]) -> str:
    try:
        return _plain(make())
    except UserError as error:
        return _plain(f"{type(error).__name__}: {error}")


def _plain(text: str) -> str:
    return text.replace(str(ROOT), ".")


@cache
def _cases() -> dict[str, Callable[[], str]]:
    cases: dict[str, Callable[[], str]] = {"help of recipes": recipe_help}
    for section in SECTIONS:
        cases[f"help of {section}"] = partial(section_help, section)
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        name = str(path.relative_to(ROOT / "recipes").with_suffix(""))
        cases[f"recipe {name}"] = partial(_recipe, path, ())
        cases[f"run of {name}"] = partial(_run, name, path)
    for name, words in _commands():
        cases[name] = partial(_recipe, ROOT / words[0], words[1:])
    for name, text in _yaml_blocks():
        cases[name] = partial(_parsed, text)
    for name in _CONFIGS:
        cases[f"arguments {name}"] = partial(_arguments, name, {})
    for name, (config, values) in _calls():
        cases[name] = partial(_arguments, config, values)
    return cases


def _recipe(path: Path, overrides: Sequence[str]) -> str:
    return load_recipe(path, overrides).to_yaml()


def _parsed(text: str) -> str:
    """A part of a recipe, with what it lacks."""
    for section, lacking in _LACKING.items():
        if not re.search(rf"^{section}:", text, re.MULTILINE):
            text += f"{section}: {lacking}\n"
    return parse_recipe(text).to_yaml()


def _run(name: str, path: Path) -> str:
    """The parts of a run of a recipe, up to the weights of its model."""
    recipe = load_recipe(path, model_of(name))
    lines = [f"of training: {key} = {value!r}" for key, value in sorted(_given(arguments_of(recipe)).items())]
    settled = recipe.pipeline.with_defaults(can_plan=True)
    lines += [f"of the pipeline: {key} = {value!r}" for key, value in sorted(settled.of_plan.items())]
    lines += [f"left open: {', '.join(settled.left_open)}"]
    if name not in ABSENT:
        lines += _of_model(recipe)
    return "\n".join(lines)


def _of_model(recipe: Recipe) -> Iterator[str]:
    config = model_config(recipe, None)
    spec = spec_of(recipe, config)
    for key, value in sorted(vars(spec).items()):
        yield f"of the model: {key} = {_shown(value)}"
    yield f"of the configuration: {json.dumps(config.to_diff_dict(), sort_keys=True, default=str)}"
    yield f"loss: {loss_of(recipe)!r}"
    workload = workload_of(recipe, config)
    yield f"mini-batch: {workload!r}"
    yield f"of the planner: {plan_inputs(recipe, workload)!r}"
    companion = companion_of(recipe)
    yield f"teacher: {None if companion is None else _shown(companion.spec.model)}"


def _shown(value: Any) -> str:
    if hasattr(value, "to_diff_dict"):
        return f"{type(value).__name__} {json.dumps(value.to_diff_dict(), sort_keys=True, default=str)}"
    if hasattr(value, "to_dict"):
        own = {key: sorted(one) if isinstance(one, set) else one for key, one in value.to_dict().items()}
        return f"{type(value).__name__} {json.dumps(own, sort_keys=True, default=str)}"
    return repr(value)


# ---------------------------------------------------------------------- arguments


def _arguments(name: str, values: dict[str, Any]) -> str:
    given = {"output_dir": "out", "num_stages": 2, "use_cpu": True} | values
    made = getattr(hf_gpipe, name)(**given)
    return "\n".join(f"{key} = {value!r}" for key, value in sorted(_given(made).items()))


def _given(arguments: Any) -> dict[str, Any]:
    """`to_dict()` without what the machine or the clock decides."""
    values: dict[str, Any] = arguments.to_dict()
    for name in ("logging_dir", "run_name", "local_rank", "push_to_hub_token", "hub_token"):
        values.pop(name, None)
    return values


def _calls() -> Iterator[tuple[str, tuple[str, dict[str, Any]]]]:
    """The calls of classes of arguments in blocks of pages and in examples."""
    sources = [(str(path.relative_to(ROOT)), path.read_text()) for path in sorted((ROOT / "examples").glob("*.py"))]
    sources += [(f"{page}:{line}", text) for page, line, language, text in _blocks() if language == "python"]
    for name, text in sources:
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        known = {own: own for own in _CONFIGS}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "hf_gpipe":
                known |= {alias.asname: alias.name for alias in node.names if alias.asname}
        for number, node in enumerate(node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            own = known.get(getattr(node.func, "id", ""))
            if own in _CONFIGS:
                yield f"arguments in {name.rpartition(':')[0] or name}, {own}, call {number}", (own, _literals(node))


def _literals(call: ast.Call) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            continue
        try:
            values[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            continue
    return values


# ---------------------------------------------------------------------- pages


def _blocks() -> Iterator[tuple[str, int, str, str]]:
    """(page, line, language, text) of each fenced block."""
    for path in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]):
        language, inside, begin = "", list[str](), 0
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.strip().startswith("```"):
                if begin:
                    yield str(path.relative_to(ROOT)), begin, language, "\n".join(inside) + "\n"
                    begin = 0
                else:
                    language, inside, begin = line.strip().removeprefix("```"), [], number
            elif begin:
                inside.append(line)


def _commands() -> Iterator[tuple[str, list[str]]]:
    """The recipes and overrides of commands on pages."""
    seen = set()
    for page, _, language, text in _blocks():
        for line in text.replace("\\\n", " ").splitlines() if language == "bash" else ():
            found = _COMMAND.search(line)
            if found is None:
                continue
            try:
                words = shlex.split(found[1], comments=True)
            except ValueError:
                continue
            overrides = [word for word in words[1:] if "=" in word and not word.startswith("-")]
            name = f"command in {page}: {' '.join([words[0], *overrides])}" if words else ""
            if words and words[0].endswith(".yaml") and os.path.exists(ROOT / words[0]) and name not in seen:
                seen.add(name)
                yield name, [words[0], *overrides]


def _yaml_blocks() -> Iterator[tuple[str, str]]:
    numbers: dict[str, int] = {}
    for page, _, language, text in _blocks():
        if language == "yaml" and re.search(r"^(model|data|pipeline|training):", text, re.MULTILINE):
            numbers[page] = numbers.get(page, 0) + 1
            yield f"block {numbers[page]} of {page}", text
