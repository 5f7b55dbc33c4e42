"""Writes the pages of docs/reference from the code: commands, recipe keys, training arguments, Trainer's methods and
attributes, and the planner's devices.

python scripts/reference.py            the pages are written
python scripts/reference.py --check    exit code 1 where a page says something else, with its name
"""

from __future__ import annotations

import inspect
import os
import sys
from dataclasses import fields
from pathlib import Path

from trainer_tables import ATTRIBUTES, IRRELEVANT, LIMITS, METHODS, SUPPORTED
from transformers import TrainingArguments

from hf_gpipe.commands import check, generate, launch, merge, plan
from hf_gpipe.commands.train import USAGE
from hf_gpipe.errors import EXIT_USER_ERROR
from hf_gpipe.planner.machines.devices import DEVICES, LINKS
from hf_gpipe.recipe.fields import SECTIONS
from hf_gpipe.recipe.help import default_text, kinds_text, recipe_help
from hf_gpipe.recipe.section import keys_of
from hf_gpipe.recipe.words import describe
from hf_gpipe.trainers.sft_config import PipelineSFTConfig
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.supported import BITSANDBYTES_OPTIMIZERS, HARMLESS_ARGUMENTS, OPTIMIZERS, REFUSED
from hf_gpipe.training.surface import FIXED, READ_ONLY
from hf_gpipe.training.surface import REFUSED as SURFACE_REFUSED

SURFACE = {
    "called, also an override": METHODS,
    "called; an override is an error": FIXED,
    "attribute, may be set": ATTRIBUTES,
    "attribute, only to be read": READ_ONLY,
    "not supported": {name: note for name, note in SURFACE_REFUSED.items() if not name.startswith("_")},
}
FOLDER = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "Written by `python scripts/reference.py`."
ARGUMENTS = """\
# Training arguments

{note} An argument that is "not supported" raises an error that names it, when the arguments are made
or when a trainer gets them.

## The pipeline's own

{own}

## Those of transformers

{library}

## Those of PipelineSFTConfig

{fine_tuning}
"""
METHODS_PAGE = """\
# Trainer's methods and attributes

{note} They are those of `Trainer` and `Seq2SeqTrainer`. What is "not supported" raises an error, which
is a `UserError` and an `AttributeError`, so `hasattr` returns False. Private methods are not supported
either.

{table}
"""
RECIPES = """\
# Recipe keys

{note} `python -m hf_gpipe.train --help SECTION` prints the same. [Recipes](../recipes.md) explains how
a recipe is read.
"""
DEVICES_PAGE = """\
# Devices and links

{note} These are the names that `--device` and `--link` of `hf-gpipe plan` know. Rates are the makers'
dense peaks; memory is what a process can have of a card, in GiB.

| device | memory | float32 TFLOP/s | bfloat16 TFLOP/s | memory TB/s | link |
|---|--:|--:|--:|--:|---|
{devices}

| link | GB/s in one direction | latency in µs |
|---|--:|--:|
{links}
"""
COMMANDS = """\
# Commands and exit codes

{note} `hf-gpipe NAME` and `python -m hf_gpipe NAME` are the same. Under torchrun the training is the
module `hf_gpipe.train`.

## Exit codes

| code | meaning |
|---|---|
| 0 | success; of `plan`: it fits; of `check`: exact |
| 1 | a fault; of `plan`: it does not fit; of `check`: not exact |
| {user} | an error that you can correct, in one line on stderr |
| 75 | the training was stopped by a signal and has saved: start it again to resume |
| 128 + n | the training was ended by signal n without saving |

## train

```text
{train}
```

## plan

```text
{plan}
```

## generate

```text
{generate}
```

## merge

```text
{merge}
```

## launch

```text
{launch}
```

## check

```text
{check}
```
"""


def arguments_page() -> str:
    """The pipeline's own arguments, transformers' in their order, and those of supervised fine-tuning."""
    library = [argument.name for argument in fields(TrainingArguments)]
    own = [argument for argument in fields(PipelineTrainingArguments) if argument.name not in library]
    rows = [f"| `{argument.name}` | {argument.metadata['help']} |" for argument in own]
    return ARGUMENTS.format(
        note=NOTE,
        own="\n".join(["| argument | |", "|---|---|", *rows]),
        library="\n".join(
            [
                "| argument | | why, and what to do instead |",
                "|---|---|---|",
                *(f"| `{name}` | {_verdict(name)} |" for name in library),
            ]
        ),
        fine_tuning=fine_tuning(),
    )


def _verdict(name: str) -> str:
    if name in SUPPORTED:  # the limit is the part that is; empty: all of it
        names = {"optimizers": ", ".join(OPTIMIZERS), "bitsandbytes": ", ".join(BITSANDBYTES_OPTIMIZERS)}
        return f"supported | {LIMITS.get(name, '').format(**names)}"
    if name in REFUSED:
        accepted = "".join(f"; {value!r} is accepted" for value in HARMLESS_ARGUMENTS.get(name, ()))
        return f"not supported | {REFUSED[name]}{accepted}"
    return f"no effect | {IRRELEVANT[name]}"


def methods_page() -> str:
    """Every public method and attribute of Trainer and Seq2SeqTrainer, by name."""
    rows = {name: f"{verdict} | {note}" for verdict, notes in SURFACE.items() for name, note in notes.items()}
    lines = ["| method or attribute | | note, and what to use instead |", "|---|---|---|"]
    return METHODS_PAGE.format(
        note=NOTE, table="\n".join([*lines, *(f"| `{name}` | {rows[name]} |" for name in sorted(rows))])
    )


def fine_tuning() -> str:
    """The arguments that PipelineSFTConfig adds, or has other defaults of, as a Markdown table."""
    base = {argument.name: argument for argument in fields(PipelineTrainingArguments)}
    lines = ["| argument | default | |", "|---|---|---|"]
    for argument in fields(PipelineSFTConfig):
        if argument.name not in base or argument.metadata["help"] != base[argument.name].metadata["help"]:
            lines.append(f"| `{argument.name}` | `{argument.default!r}` | {argument.metadata['help']} |")
    return "\n".join(lines)


def recipes_page() -> str:
    """Every key of every section, from the fields."""
    lines = [RECIPES.format(note=NOTE)]
    for name, cls in SECTIONS.items():
        lines += [f"## {name}", "", inspect.cleandoc(cls.__doc__ or ""), ""]
        for key in keys_of(cls).values():
            lines += [
                f"* **`{name}.{key.name}`**: {describe(key.schema)}; {default_text(key)}{kinds_text(key)}  ",
                "  " + key.text.replace("<", "\\<"),  # Markdown would take <2de> for a tag
            ]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def devices_page() -> str:
    """The planner's table of devices and links."""
    names = {link: name for name, link in LINKS.items()}
    devices = [
        f"| `{device.name}` | {(device.memory_bytes or 0) / 2**30:.1f} | {device.flops_for('float32') / 1e12:g} | "
        f"{device.flops_for('bfloat16') / 1e12:g} | {device.bytes_per_second / 1e12:g} | `{names[device.link]}` |"
        for device in DEVICES.values()
    ]
    links = [
        f"| `{name}` | {link.bytes_per_second / 1e9:g} | {link.latency_seconds * 1e6:g} |"
        for name, link in LINKS.items()
    ]
    return DEVICES_PAGE.format(note=NOTE, devices="\n".join(devices), links="\n".join(links))


def commands_page() -> str:
    """The help of each command."""
    os.environ["COLUMNS"] = "100"
    helps = {
        module.__name__.rpartition(".")[2]: module._parser().format_help().strip()
        for module in (check, generate, launch, merge, plan)
    }
    train = USAGE.format(recipe=recipe_help()).strip()
    return COMMANDS.format(note=NOTE, user=EXIT_USER_ERROR, train=train, **helps)


PAGES = {
    "arguments.md": arguments_page,
    "trainer.md": methods_page,
    "recipes.md": recipes_page,
    "devices.md": devices_page,
    "commands.md": commands_page,
}


def main() -> int:
    texts = {FOLDER / name: page() for name, page in PAGES.items()}
    if "--check" in sys.argv[1:]:
        stale = [path.name for path, text in texts.items() if not path.is_file() or path.read_text("utf-8") != text]
        print(*(f"{name} is not as the code is: python scripts/reference.py" for name in stale), sep="\n", end="")
        return int(bool(stale))
    FOLDER.mkdir(exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
