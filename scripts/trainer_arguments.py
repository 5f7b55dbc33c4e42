"""Writes the table of training arguments in docs/trainer.md from hf_gpipe/training/supported.py.

python scripts/trainer_arguments.py            the table is written
python scripts/trainer_arguments.py --check    exit code 1 where the page says something else
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

from transformers import TrainingArguments

from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.supported import (
    BITSANDBYTES_OPTIMIZERS,
    HARMLESS_ARGUMENTS,
    HONOURED,
    IRRELEVANT,
    LIMITS,
    OPTIMIZERS,
    REFUSED,
)

PAGE = Path(__file__).parents[1] / "docs" / "trainer.md"
BEGIN, END = "<!-- arguments: begin -->", "<!-- arguments: end -->"


def table() -> str:
    """Both tables as Markdown: the pipeline's own arguments, and transformers' in their order."""
    library = [argument.name for argument in fields(TrainingArguments)]
    own = [argument for argument in fields(PipelineTrainingArguments) if argument.name not in library]
    lines = ["| the pipeline's own | |", "|---|---|"]
    lines += [f"| `{argument.name}` | {argument.metadata['help']} |" for argument in own]
    lines += ["", "| argument | | why, and what to do instead |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {_verdict(name)} |" for name in library)])


def _verdict(name: str) -> str:
    if name in HONOURED:
        return f"honoured | {_limit(name)}"
    if name in REFUSED:
        accepted = "".join(f"; {value!r} is accepted" for value in HARMLESS_ARGUMENTS.get(name, ()))
        return f"refused | {REFUSED[name]}{accepted}"
    return f"no effect | {IRRELEVANT[name]}"


def _limit(name: str) -> str:
    """What part of an argument is honoured; empty: all of it."""
    names = {"optimizers": OPTIMIZERS, "bitsandbytes": BITSANDBYTES_OPTIMIZERS}
    return LIMITS.get(name, "").format(**{key: ", ".join(value) for key, value in names.items()})


def main() -> int:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        return int(page != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
