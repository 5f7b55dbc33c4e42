"""Writes the tables of docs/trainer.md: training arguments from supported.py, Trainer's methods and attributes from
surface.py, those of fine-tuning from sft_config.py, all in hf_gpipe/training.

python scripts/trainer_arguments.py            the tables are written
python scripts/trainer_arguments.py --check    exit code 1 where the page says something else
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

from transformers import TrainingArguments

from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.sft_config import PipelineSFTConfig
from hf_gpipe.training.supported import (
    BITSANDBYTES_OPTIMIZERS,
    HARMLESS_ARGUMENTS,
    HONOURED,
    IRRELEVANT,
    LIMITS,
    OPTIMIZERS,
    REFUSED,
)
from hf_gpipe.training.surface import ATTRIBUTES, FIXED, METHODS, READ_ONLY
from hf_gpipe.training.surface import REFUSED as SURFACE_REFUSED

SURFACE = {
    "called, also an override": METHODS,
    "here, an override is refused": FIXED,
    "attribute, may be set": ATTRIBUTES,
    "attribute, only to be read": READ_ONLY,
    "refused": {name: note for name, note in SURFACE_REFUSED.items() if not name.startswith("_")},
}

PAGE = Path(__file__).parents[1] / "docs" / "trainer.md"


def arguments() -> str:
    """Both tables as Markdown: the pipeline's own arguments, and transformers' in their order."""
    library = [argument.name for argument in fields(TrainingArguments)]
    own = [argument for argument in fields(PipelineTrainingArguments) if argument.name not in library]
    lines = ["| the pipeline's own | |", "|---|---|"]
    lines += [f"| `{argument.name}` | {argument.metadata['help']} |" for argument in own]
    lines += ["", "| argument | | why, and what to do instead |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {_verdict(name)} |" for name in library)])


def _verdict(name: str) -> str:
    if name in HONOURED:  # the limit is the part that is; empty: all of it
        names = {"optimizers": ", ".join(OPTIMIZERS), "bitsandbytes": ", ".join(BITSANDBYTES_OPTIMIZERS)}
        return f"honoured | {LIMITS.get(name, '').format(**names)}"
    if name in REFUSED:
        accepted = "".join(f"; {value!r} is accepted" for value in HARMLESS_ARGUMENTS.get(name, ()))
        return f"refused | {REFUSED[name]}{accepted}"
    return f"no effect | {IRRELEVANT[name]}"


def surface() -> str:
    """Every public method and attribute of Trainer and Seq2SeqTrainer as a Markdown table, by name."""
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


def with_table(page: str, name: str, table: str) -> str:
    """The page with another table between the marks of this name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


def main() -> int:
    page = before = PAGE.read_text(encoding="utf-8")
    for name, table in (("arguments", arguments()), ("surface", surface()), ("fine-tuning", fine_tuning())):
        page = with_table(page, name, table)
    if "--check" in sys.argv[1:]:
        return int(page != before)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
