"""Rehearses the recipes of the paper's sizes: each is trained with a model of some 60 million parameters.

    python scripts/rehearse_paper.py [--steps 50] [--output FOLDER] [RECIPE ...] [key=value ...]

Each recipe runs by `hf-gpipe train` as it stands: its layers and its stages, a stream of a data set of the
Hub's form, temperature, bfloat16, recomputation, its optimizer, accumulation, initialisation and clipped logits. What
is smaller: the width, the mini-batches and the vocabulary; the texts are phrases of the Unicode CLDR. After that plain
transformers loads the model. So an error that would come after a download of 55 million pairs comes here.

Exit code: 0 each ran, its loss fell and its model loads; 1 otherwise; 2 an error that you can correct.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import pyarrow
import pyarrow.parquet
from bench.report import table
from translation_scaling import execute

from hf_gpipe.commands.base import Parser, run_command
from hf_gpipe.data import build_corpus
from hf_gpipe.errors import UserError
from hf_gpipe.recipe import DataSection

RECIPES = Path(__file__).parents[1] / "recipes" / "translation"
#: Recipe -> d_model and T(L, H, A) with the paper's L, of 50 to 70 million parameters.
SIZES = {
    "paper-400m": (256, "T(6, 7168, 14)"),
    "paper-1.3b-deep": (224, "T(24, 2048, 4)"),
    "paper-1.3b-wide": (256, "T(12, 3584, 7)"),
    "paper-3b": (224, "T(32, 1536, 3)"),
    "paper-6b": (160, "T(64, 1024, 2)"),
    **dict.fromkeys(("paper-batch-260k", "paper-batch-1m", "paper-batch-4m"), (256, "T(6, 7168, 14)")),
}
LANGUAGES = ("de", "fr", "ru", "zh", "ar", "sw")
#: Updates after which the loss must have fallen.
_FEWEST = 10
_ROWS = {"train": 400, "validation": 8, "test": 8}


def write_data(folder: Path) -> Path:
    """Write phrases as a data set of the Hub's form, a subset "de-en" of {"translation": {"de": ..., "en": ...}}."""
    data = DataSection(kind="cldr", languages=list(LANGUAGES), examples_per_language=1000)
    pairs = build_corpus(data).train
    configs, infos = ["configs:"], ["dataset_info:"]
    for language in LANGUAGES:
        subset = "-".join(sorted((language, "en")))
        own = [
            {"translation": {language: pair.source, "en": pair.target}} for pair in pairs if pair.language == language
        ]
        (folder / subset).mkdir(parents=True)
        configs.append(f"- config_name: {subset}\n  data_files:")
        infos.append(f"- config_name: {subset}\n  splits:")
        start = 0
        for split, count in _ROWS.items():
            rows = own[start : start + count]
            path = folder / subset / f"{split}-00000-of-00001.parquet"
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
            configs.append(f"  - split: {split}\n    path: {subset}/{split}-*")
            infos.append(f"  - name: {split}\n    num_bytes: 1\n    num_examples: {len(rows)}")
            start += count
    (folder / "README.md").write_text("\n".join(["---", *configs, *infos, "---", ""]))
    return folder


def overrides(name: str, steps: int, data: Path, output: Path) -> list[str]:
    """The overrides that make the run of a recipe small."""
    width, transformer = SIZES[name]
    is_batch = name.startswith("paper-batch")
    languages = ["de"] if is_batch else list(LANGUAGES)
    return [
        *(f"model.config.d_model={width}", f'model.transformer="{transformer}"'),
        *(f"data.path={json.dumps(str(data))}", f"data.languages=[{', '.join(languages)}]", "data.shuffle_buffer=100"),
        *(["data.subset=de-en"] if is_batch else []),
        *("data.max_source_tokens=32", "data.max_target_tokens=32", "data.max_held_out=8"),
        # The phrases of one language yield no more than 820 different tokens.
        *(f"tokenizer.vocab_size={700 if is_batch else 1500}", "pipeline.num_micro_batches=4"),
        "pipeline.num_processes=1",
        *(f"training.max_steps={steps}", "training.batch_tokens=128", "training.warmup_steps=10"),
        *("training.learning_rate=1.0e-3", "training.logging_steps=1"),
        *(f"training.eval_steps={max(1, steps // 2)}", f"training.save_steps={max(1, steps // 2)}"),
        *("evaluation.max_examples=2", "evaluation.max_new_tokens=8", "evaluation.samples=0"),
        f"training.output_dir={json.dumps(str(output))}",
    ]


def rehearse(name: str, words: Sequence[str], output: Path) -> list[str]:
    """Train one recipe and load its model: a row of the table. Raises UserError where it fails."""
    began = time.perf_counter()
    log = output.with_suffix(".log")
    with log.open("w") as file:
        code = execute.start([str(RECIPES / f"{name}.yaml"), *words], file).wait()
    if code:
        raise UserError(
            f"{name} ended with exit code {code}; its log {log} ends with: {' '.join(execute.log_end(log, 3))}"
        )
    from transformers import AutoModelForSeq2SeqLM

    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    last = mean(losses[-5:])
    if len(losses) >= _FEWEST and not last < losses[0]:
        raise UserError(f"{name}: the loss was {losses[0]:.3f} and is {last:.3f} after {len(losses)} updates")
    model, report = AutoModelForSeq2SeqLM.from_pretrained(output, output_loading_info=True)
    if report["missing_keys"] or report["unexpected_keys"]:
        raise UserError(f"{name}: transformers finds other weights than its own in {output}")
    metrics = json.loads((output / "metrics.json").read_text())
    return [
        *(name, f"{model.num_parameters() / 1e6:.0f}M", str(metrics["cost"]["num_stages"]), str(len(losses))),
        *(f"{losses[0]:.3f}", f"{last:.3f}", f"{time.perf_counter() - began:.0f} s"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = Parser(__doc__)
    parser.add_argument("words", nargs="*", metavar="RECIPE or key=value", help=f"of {', '.join(SIZES)}; default: all")
    parser.add_argument("--steps", type=int, default=50, help="updates of each; default: 50")
    parser.add_argument("--output", type=Path, help="folder of the runs; default: one that is deleted")

    def work() -> int:
        options = parser.parse_intermixed_args(argv)
        names = [word for word in options.words if "=" not in word] or list(SIZES)
        more = [word for word in options.words if "=" in word]
        if unknown := [name for name in names if name not in SIZES]:
            raise UserError(f"{unknown[0]!r} is none of the recipes {', '.join(SIZES)}")
        rows, code = [], 0
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.output or Path(temporary)
            data = folder / "data" if (folder / "data").exists() else write_data(folder / "data")
            for name in names:
                own = overrides(name, options.steps, data, folder / name)
                try:
                    rows.append(rehearse(name, [*own, *more], folder / name))
                except UserError as error:
                    print(f"error: {error}", file=sys.stderr, flush=True)
                    code = 1
        print(table(["recipe", "parameters", "K", "updates", "first loss", "last loss", "time"], rows))
        return code

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())
