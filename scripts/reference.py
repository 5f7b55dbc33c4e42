"""Writes the lists in the pages of docs/reference from the code: commands, recipe keys, training arguments, Trainer's
methods and attributes, the modes of a pipeline, and the planner's devices.

python scripts/reference.py            the lists are written
python scripts/reference.py --check    exit code 1 where a page says something else, with its name
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from pages import block, write
from trainer_tables import ATTRIBUTES, FIXED, IRRELEVANT, LACKING, LIMITS, METHODS, READ_ONLY, SUPPORTED
from transformers import TrainingArguments

from hf_gpipe.commands import check, generate, launch, merge, plan, simulate
from hf_gpipe.commands.train import USAGE
from hf_gpipe.planner.machines.devices import DEVICES, LINKS
from hf_gpipe.recipe.fields import SECTIONS
from hf_gpipe.recipe.help import default_text, kinds_text, recipe_help
from hf_gpipe.settings.mode import COMPARED_ROWS
from hf_gpipe.settings.optimizers import OPTIMIZERS
from hf_gpipe.settings.pipeline import PipelineConfig
from hf_gpipe.settings.section import keys_of
from hf_gpipe.settings.words import describe
from hf_gpipe.tasks.sft import PipelineSFTConfig
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.supported import HARMLESS_ARGUMENTS, MISSING_ARGUMENTS, REFUSED

SURFACE = {
    "called, also an override": METHODS,
    "called; an override is an error": FIXED,
    "attribute, may be set": ATTRIBUTES,
    "attribute, only to be read": READ_ONLY,
    "not supported": LACKING,
}
FOLDER = Path(__file__).parents[1] / "docs" / "reference"

LIBRARY = [argument.name for argument in fields(TrainingArguments)]


def own_arguments() -> str:
    """The pipeline's own."""
    own = [argument for argument in fields(PipelineTrainingArguments) if argument.name not in LIBRARY]
    rows = [f"| `{argument.name}` | {argument.metadata['help']} |" for argument in own]
    return "\n".join(["| argument | |", "|---|---|", *rows])


def library_arguments() -> str:
    """Those of transformers, in their order."""
    rows = [f"| `{name}` | {_verdict(name)} |" for name in LIBRARY]
    return "\n".join(["| argument | | why, and what to do instead |", "|---|---|---|", *rows])


def _verdict(name: str) -> str:
    if name in SUPPORTED:  # the limit is the part that is; empty: all of it
        of_package = {name: state.needs_bitsandbytes for name, state in OPTIMIZERS.items()}
        names = {
            "optimizers": ", ".join(name for name, needs in of_package.items() if not needs),
            "bitsandbytes": ", ".join(name for name, needs in of_package.items() if needs),
        }
        return f"supported | {LIMITS.get(name, '').format(**names)}"
    if name in REFUSED:
        accepted = "".join(f"; {value!r} is accepted" for value in HARMLESS_ARGUMENTS.get(name, ()))
        return f"not supported | {REFUSED[name]}{accepted}"
    return f"no effect | {IRRELEVANT[name]}"


def methods() -> str:
    """Every public method and attribute of Trainer and Seq2SeqTrainer, by name."""
    rows = {name: f"{verdict} | {note}" for verdict, notes in SURFACE.items() for name, note in notes.items()}
    lines = ["| method or attribute | | note, and what to use instead |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {rows[name]} |" for name in sorted(rows))])


def fine_tuning() -> str:
    """The arguments that PipelineSFTConfig adds, or has other defaults of, as a Markdown table."""
    base = {argument.name: argument for argument in fields(PipelineTrainingArguments)}
    lines = ["| argument | default | |", "|---|---|---|"]
    for argument in fields(PipelineSFTConfig):
        if argument.name not in base or argument.metadata["help"] != base[argument.name].metadata["help"]:
            lines.append(f"| `{argument.name}` | `{argument.default!r}` | {argument.metadata['help']} |")
    return "\n".join(lines)


def missing_arguments() -> str:
    """The arguments of TRL's configurations, and of older releases, that do not exist, as a Markdown table."""
    rows = [f"| `{name}` | {note} |" for name, note in MISSING_ARGUMENTS.items()]
    return "\n".join(["| argument | why, and what to do instead |", "|---|---|", *rows])


def recipe_keys() -> str:
    """Every key of every section, from the fields."""
    lines = []
    for name, cls in SECTIONS.items():
        lines += [f"## {name}", "", inspect.cleandoc(cls.__doc__ or ""), ""]
        for key in keys_of(cls).values():
            lines += [
                f"* **`{name}.{key.name}`**: {describe(key.schema)}; {default_text(key)}{kinds_text(key)}  ",
                "  " + key.text.replace("<", "\\<"),  # Markdown would take <2de> for a tag
            ]
        lines.append("")
    return "\n".join(lines).rstrip()


def devices() -> str:
    """The planner's devices."""
    names = {link: name for name, link in LINKS.items()}
    head = "| device | memory | float32 TFLOP/s | bfloat16 TFLOP/s | memory TB/s | link |\n|---|--:|--:|--:|--:|---|"
    rows = [
        f"| `{device.name}` | {(device.memory_bytes or 0) / 2**30:.1f} | {device.flops_for('float32') / 1e12:g} | "
        f"{device.flops_for('bfloat16') / 1e12:g} | {device.bytes_per_second / 1e12:g} | `{names[device.link]}` |"
        for device in DEVICES.values()
    ]
    return "\n".join([head, *rows])


def links() -> str:
    """The planner's links."""
    rows = [
        f"| `{name}` | {link.bytes_per_second / 1e9:g} | {link.latency_seconds * 1e6:g} |"
        for name, link in LINKS.items()
    ]
    return "\n".join(["| link | GB/s in one direction | latency in µs |\n|---|--:|--:|", *rows])


def _modes() -> dict[str, tuple[str, dict[str, str]]]:
    """The setting of each mode, and what it excludes, by its field; and what modes exclude that is none."""
    of_fields = {name: (mode.setting(), mode.excludes) for name, mode in PipelineConfig().modes.items()}
    return {**of_fields, COMPARED_ROWS: ("a loss that compares rows", {})}


def modes() -> str:
    """The pairs of modes that do not go together."""
    every = _modes()
    lines = ["| | " + " | ".join(map(str, range(1, len(every) + 1))) + " |", "|---|" + ":-:|" * len(every)]
    for number, (one, (setting, excludes)) in enumerate(every.items(), 1):
        cells = ["x" if other in excludes or one in every[other][1] else "" for other in every]
        lines.append(f"| {number} {_named(setting)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def reasons() -> str:
    """Why modes do not go together, where a reason is given."""
    every = _modes()
    lines = []
    for setting, excludes in every.values():
        for other, why in excludes.items():
            if why.startswith(":"):
                lines.append(f"* `{setting}` and {_named(every[other][0])}{why}.")
    return "\n".join(lines)


def _named(setting: str) -> str:
    return setting if " " in setting and ":" not in setting else f"`{setting}`"


def command_help(text: str) -> str:
    return f"```text\n{text.strip()}\n```"


#: The parts of each page, by their names in it.
PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "arguments.md": {
        "own": own_arguments,
        "library": library_arguments,
        "fine-tuning": fine_tuning,
        "missing": missing_arguments,
    },
    "trainer.md": {"methods": methods},
    "recipes.md": {"keys": recipe_keys},
    "modes.md": {"modes": modes, "reasons": reasons},
    "devices.md": {"devices": devices, "links": links},
    "commands.md": {
        "train": lambda: command_help(USAGE.format(recipe=recipe_help())),
        **{
            module.__name__.rpartition(".")[2]: lambda module=module: command_help(module._parser().format_help())
            for module in (plan, simulate, generate, merge, launch, check)
        },
    },
}


def main() -> int:
    os.environ["COLUMNS"] = "100"
    only_check = "--check" in sys.argv[1:]
    stale = [
        name
        for name, parts in PAGES.items()
        if not write(FOLDER / name, {part: block(text()) for part, text in parts.items()}, only_check=only_check)
    ]
    if only_check:
        print(*(f"{name} is not as the code is: python scripts/reference.py" for name in stale), sep="\n", end="")
    return int(only_check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
