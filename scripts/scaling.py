"""GPipe's comparison of depth and width in translation from many languages: a sweep of runs, tables, and a report.

    python scripts/scaling.py recipes/translation/laptop-base.yaml recipes/translation/laptop-deep.yaml \\
        recipes/translation/laptop-wide.yaml --seeds 1 2 --output outputs/scaling [key=value ...]

    python scripts/scaling.py --list [--share 0.25]
    python scripts/scaling.py main --output outputs/scaling [--share 0.25] [--keep DIR] [--background]
    python scripts/scaling.py main --output outputs/scaling --status

The first form trains every recipe with every seed (training.seed; the data stay the same), one run after the other or
--at-once N of them, a seed of all recipes first. What is finished is skipped, and what was interrupted goes on from
its last checkpoint: the same command may be given again at any time, and Ctrl-C leaves everything so. After a run that
failed no other begins, and the others' results are kept. key=value are overrides for all recipes. Small models are
trained faster as several runs of one process each, --at-once 2 pipeline.num_stages=1, than as one pipeline.

Words that are no files name experiments on the corpus of scripts/message_catalogues.py, whose models are trained to
their end; --to-end does the same with recipes. A model is at its end after at least 3 passes, when the best validation
loss per character has changed by less than 1 % over the last tenth of its updates, and 20 % more updates at a
constant rate change it by less than 1 %. Then its learning rate falls to 0. docs/scaling.md has more.

It writes into the output folder: RECIPE/seed-S/ (each run), curves.csv (of all runs), report.md with its pictures
languages.png, buckets.png and curves.png, and its tables: results.csv (a row a language), runs.csv (a row a run),
differences.csv, and learning.csv (the curves of finished runs). The reports of experiments are in reports/NAME/, with
baselines.csv and transfer.png where models of one language are finished. --draw DIR draws the pictures of such a folder
from its tables. The paper is arXiv 1811.06965, section 5.

Exit code: 0 all is finished, 1 a run failed, 2 an error that you can correct, 75 stopped, to be given again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pandas as pd
from translation_scaling.curves import read_curve
from translation_scaling.differences import Difference, compare_all, contrast
from translation_scaling.draw import draw
from translation_scaling.execute import EXIT_STOPPED, execute
from translation_scaling.experiments import EXPERIMENTS, SWEEP_STEPS, Asked, experiment, plan_experiments
from translation_scaling.learning import Learning
from translation_scaling.report import report
from translation_scaling.results import (
    BASELINES_FILE,
    MEASURES,
    RESULTS_FILE,
    RUNS_FILE,
    Finished,
    Results,
    finished_runs,
    read_csv,
    with_baselines,
    write_csv,
)
from translation_scaling.roles import Roles
from translation_scaling.runs import Run, plan_runs
from translation_scaling.share import part_of
from translation_scaling.status import hours_text, status_text

from hf_gpipe.commands.base import Parser, run_command
from hf_gpipe.data.files import check_files
from hf_gpipe.errors import UserError
from hf_gpipe.recipe import load_recipe

REPORT_FILE, CURVES_FILE, LOG_FILE = "report.md", "curves.csv", "scaling.log"
LEARNING_FILE, DIFFERENCES_FILE = "learning.csv", "differences.csv"
_L10N = Path(__file__).parents[1] / "recipes" / "translation" / "l10n-base.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # Taken out first, for an option that takes several words would take them too.
    overrides = [word for word in words if "=" in word and not word.startswith("-")]

    def work() -> int:
        options = _parser().parse_intermixed_args([word for word in words if word not in overrides])
        return _draw_again(options) if options.draw is not None else _scale(options, overrides, words)

    return run_command(work)


def _scale(options: argparse.Namespace, overrides: list[str], words: Sequence[str]) -> int:
    asked = options.recipes or ([known.name for known in EXPERIMENTS] if options.list or options.status else [])
    if not asked and not options.report_only:
        raise UserError("no recipe is given; name those to compare, or give --report-only for what is there")
    if options.background:
        return _background(options.output, words)
    recipes = [word for word in asked if word.endswith((".yaml", ".yml"))]
    names = [word for word in asked if word not in recipes]
    if recipes and names:
        raise UserError(f"{recipes[0]} is a recipe and {names[0]} an experiment; give one command for each kind")
    if options.share is not None and not options.list:
        data = load_recipe(recipes[0] if recipes else _L10N, overrides).data
        check_files(data)
        part = part_of(data, options.share, options.output / "corpus")
        overrides = [*overrides, f"data.path={json.dumps(str(part))}"]
    each = [Asked(seed, overrides, options.output, options.sweep_steps) for seed in options.seeds or [1]]
    if options.list:
        return _list_experiments(names, recipes, each, options.share or 1.0)
    seeds, paths = options.seeds or [1], [Path(word) for word in recipes]
    plain = plan_runs(paths, seeds, overrides, options.output, to_end=options.to_end)
    runs = plan_experiments(names, each) if names else plain
    if options.status:
        print(status_text(runs))
        return 0
    code = 0
    if not options.report_only:
        code = execute(runs, options.keep, options.at_once)
        write_csv(options.output / CURVES_FILE, (row for run in runs for row in read_curve(run.folder).rows(*run.key)))
    if code == EXIT_STOPPED:
        # Whoever stops it does not want to wait for a report; --report-only makes one of what is finished.
        return code
    if not names:
        return _report(runs, [], options.output, code, options)
    for chosen in (experiment(name) for name in names):
        if chosen.compares:
            mine = [run for of_seed in each for run in chosen.runs(of_seed)]
            alone = (
                [run for of_seed in each for run in experiment(chosen.baselines).runs(of_seed)]
                if chosen.baselines
                else []
            )
            code = max(code, _report(mine, alone, options.output / "reports" / chosen.name, code, options))
    return code


def _background(output: Path, words: Sequence[str]) -> int:
    """Start the same command as a process of its own, which a terminal's end does not end."""
    output.mkdir(parents=True, exist_ok=True)
    log = output / LOG_FILE
    command = [sys.executable, __file__, *(word for word in words if word != "--background")]
    with log.open("a") as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        child = subprocess.Popen(command, **streams, start_new_session=True)  # type: ignore[call-overload]
    print(f"started as process {child.pid}; its words are in {log}, --status says how far it is, and")
    print(f"`kill {child.pid}` stops it after its step is saved; the same command then goes on")
    return 0


def _list_experiments(names: Sequence[str], recipes: Sequence[str], each: Sequence[Asked], share: float) -> int:
    """Each experiment with its runs and their hours."""
    if recipes:
        raise UserError(f"--list is for experiments, and {recipes[0]} is a recipe; use --status")
    listed: set[tuple[str, int]] = set()
    for chosen in (experiment(name) for name in names):
        lines = hours_text(plan_experiments([chosen.name], each), share, listed).splitlines()
        print(f"{chosen.name}: {chosen.question}", *(f"    {line}" for line in lines), sep="\n")
    return 0


# ---------------------------------------------------------------------- from runs to tables to a report


def _finished(runs: Sequence[Run], options: argparse.Namespace) -> list[Finished]:
    """The finished ones of the runs; without any given, all in the output folder."""
    models = list(dict.fromkeys(run.name for run in runs)) or None
    seeds = options.seeds or ([1] if models and not options.report_only else None)
    others = {run.folder for run in runs if run.progress()[0] == "other"}
    for folder in sorted(others):
        print(f"{folder} has results of another recipe; they are left out", file=sys.stderr)
    # A training to its end has metrics after each of its parts.
    unfinished = {run.folder for run in runs if run.to_end and run.progress()[0] != "finished"}
    return [run for run in finished_runs(options.output, models, seeds) if run.folder not in others | unfinished]


def _report(runs: Sequence[Run], alone: Sequence[Run], folder: Path, code: int, options: argparse.Namespace) -> int:
    """Write the report of the finished runs, its tables and its pictures; returns the exit code of the command."""
    finished = _finished(runs, options)
    try:
        results = Results.of_runs(finished)
    except UserError:
        if code:
            return code
        raise
    roles = Roles.of(results.models)
    kept = [run for run in finished if (run.model, run.seed) in results.keys]
    singles = _finished(alone, options) if alone else []
    learnt = [entry for entry in map(Learning.of, kept) if entry.curve.best is not None]
    differences = _all_differences(results, roles)
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / RESULTS_FILE, (row for run in finished for row in run.rows()))
    write_csv(folder / RUNS_FILE, (run.cost_row() for run in [*finished, *singles]))
    rows = [row for run in singles for row in run.rows()]
    write_csv(folder / BASELINES_FILE, rows)
    write_csv(folder / LEARNING_FILE, (row for entry in learnt for row in entry.rows()))
    write_csv(folder / DIFFERENCES_FILE, (difference.row() for difference in differences))
    texts = {(run.model, run.seed): run.translations() for run in singles}
    transfer = with_baselines(results, pd.DataFrame(rows), texts)
    draw(folder, results, roles, differences, learnt, transfer)
    done = {run.folder for run in finished}
    unfinished = [run.title for run in runs if run.folder not in done]
    text = report(results, kept, unfinished, differences, learnt, transfer, has_roles=bool(roles.pairs))
    (folder / REPORT_FILE).write_text(text, encoding="utf-8")
    print(f"report  {folder / REPORT_FILE}", flush=True)
    return code


def _all_differences(results: Results, roles: Roles) -> list[Difference]:
    """Of the pairs of the roles, or of each model and the first if there are none; then those of low and high."""
    pairs = roles.pairs or tuple((model, results.models[0]) for model in results.models[1:])
    of_buckets = (contrast(results, *pair, measure) for pair in pairs for measure in MEASURES)
    return [*compare_all(results, pairs), *(difference for difference in of_buckets if difference is not None)]


def _draw_again(options: argparse.Namespace) -> int:
    """Draw the pictures of a report from its tables."""
    folder = options.draw
    results = Results.of(read_csv(folder / RESULTS_FILE))
    baselines, differences, learning = (
        read_csv(folder / name) if (folder / name).exists() else pd.DataFrame()
        for name in (BASELINES_FILE, DIFFERENCES_FILE, LEARNING_FILE)
    )
    roles = Roles.of(results.models)
    all_differences = [Difference.of_row(row) for row in differences.itertuples()]
    learnt = Learning.of_table(learning) if len(learning) else []
    draw(folder, results, roles, all_differences, learnt, with_baselines(results, baselines))
    print(f"pictures in {folder}")
    return 0


# ---------------------------------------------------------------------- options


def _at_least_one(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least 1")
    return int(word)


def _parser() -> Parser:
    parser = Parser(__doc__)
    which = "recipes (.yaml) to compare, or names of experiments; key=value overrides a key of all"
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=which)
    for name, text in (
        ("--list", "print the experiments, their runs and the hours of each"),
        ("--status", "print how far each run is and when it will end"),
        ("--background", "go on in a process that outlives the terminal"),
        ("--to-end", "train recipes until they are at their end"),
        ("--report-only", "train nothing; report on what is finished"),
    ):
        parser.add_argument(name, action="store_true", help=text)
    for name, default, text in (
        ("--sweep-steps", SWEEP_STEPS, "updates of each run that tries a learning rate"),
        ("--at-once", 1, "runs that are trained at a time"),
    ):
        parser.add_argument(name, type=_at_least_one, default=default, metavar="N", help=f"{text}; default: {default}")
    parser.add_argument("--share", type=float, help="train on this share of each language's pairs, such as 0.25")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="folder that survives: copies of checkpoints, curves")
    parser.add_argument("--seeds", type=int, nargs="+", help="values of training.seed; default: 1")
    parser.add_argument("--output", type=Path, default=Path("outputs/scaling"), help="folder; default: outputs/scaling")
    parser.add_argument(
        "--draw", type=Path, metavar="DIR", help="draw the pictures of a report from its tables, no more"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
