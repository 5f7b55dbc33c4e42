"""GPipe's comparison of depth and width in translation from many languages, from the runs to the report.

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

from translation_scaling.claims import Roles, compared
from translation_scaling.curves import curve_rows, read_curve
from translation_scaling.differences import compare_all
from translation_scaling.execute import EXIT_STOPPED, execute
from translation_scaling.experiments import EXPERIMENTS, SWEEP_STEPS, Asked, experiment, plan_experiments
from translation_scaling.results import RESULTS_FILE, RUNS_FILE, Finished, Results, finished_runs, write_csv
from translation_scaling.roles import roles_of
from translation_scaling.runs import Run, plan_runs
from translation_scaling.share import part_of
from translation_scaling.status import hours_text, status_text
from translation_scaling.transfer import BASELINES_FILE, with_baselines

from hf_gpipe.command import Parser, run_command
from hf_gpipe.data.files import check_files
from hf_gpipe.errors import UserError
from hf_gpipe.recipe import load_recipe

REPORT_FILE, CURVES_FILE, LOG_FILE = "report.md", "curves.csv", "scaling.log"
LEARNING_FILE, DIFFERENCES_FILE = "learning.csv", "differences.csv"
PAPER_RECIPES = ("paper-400m", "paper-1.3b-deep", "paper-1.3b-wide", "paper-3b", "paper-6b")
_TRANSLATION = Path(__file__).parents[1] / "recipes" / "translation"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # Taken out first, for an option that takes several words would take them too.
    overrides = [word for word in words if _is_override(word)]

    def work() -> int:
        options = _parser().parse_intermixed_args([word for word in words if not _is_override(word)])
        options.words = words
        return _scale(options, overrides)

    return run_command(work)


def _is_override(word: str) -> bool:
    return "=" in word and not word.startswith("-")


def _scale(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if options.draw is not None:
        return _draw_again(options.draw, options)
    asked = options.recipes or ([one.name for one in EXPERIMENTS] if options.list or options.status else [])
    if not asked and not options.report_only:
        raise UserError("no recipe is given; name those to compare, or give --report-only for what is there")
    for path in (paper := _paper_recipes(options)):
        load_recipe(path)
    if options.background:
        return _background(options)
    runs = _runs(asked, overrides, options)
    if options.list:
        _list_experiments(asked, overrides, options)
        return 0
    if options.status:
        print(status_text(runs))
        return 0
    if options.dry_run:
        _list(runs)
        return 0
    code = 0
    if not options.report_only:
        code = execute(runs, options.keep, options.at_once)
        write_curves(runs, options.output)
    if code == EXIT_STOPPED:
        # Whoever stops it does not want to wait for a report; --report-only makes one of what is finished.
        return code
    names = [word for word in asked if not _is_recipe(word)]
    for one in (experiment(name) for name in names):
        if one.compares:
            wanted = _asked(overrides, options)
            mine = [run for each in wanted for run in one.runs(each)]
            alone = [run for each in wanted for run in experiment(one.baselines).runs(each)] if one.baselines else []
            code = max(code, _report(mine, alone, options.output / "reports" / one.name, code, paper, options))
    return code if names else _report(runs, [], options.output, code, paper, options)


def _report(
    runs: Sequence[Run],
    alone: Sequence[Run],
    folder: Path,
    code: int,
    paper: Sequence[Path],
    options: argparse.Namespace,
) -> int:
    """Write the report of the finished runs into a folder; returns the exit code of the command."""
    try:
        results = Results(_finished(options, runs))
    except UserError:
        if code:
            return code
        raise
    models = [run.name for run in runs] or results.models
    roles = roles_of(tuple(dict.fromkeys(models)), options.baseline, options.pair)
    write_report(results, roles, runs, _finished(options, alone) if alone else [], paper, options, folder)
    return code


def _is_recipe(word: str) -> bool:
    return word.endswith((".yaml", ".yml"))


def _runs(asked: Sequence[str], overrides: Sequence[str], options: argparse.Namespace) -> list[Run]:
    """The runs of recipes, or of experiments. Raises UserError if both are given."""
    recipes = [word for word in asked if _is_recipe(word)]
    names = [word for word in asked if not _is_recipe(word)]
    if recipes and names:
        raise UserError(f"{recipes[0]} is a recipe and {names[0]} an experiment; give one command for each kind")
    if options.share is not None and not options.list:
        overrides = [*overrides, _part(recipes, overrides, options)]
    if names:
        return plan_experiments(names, _asked(overrides, options))
    return plan_runs(
        [Path(word) for word in recipes], options.seeds or [1], overrides, options.output, to_end=options.to_end
    )


def _asked(overrides: Sequence[str], options: argparse.Namespace) -> list[Asked]:
    return [Asked(seed, overrides, options.output, options.sweep_steps) for seed in options.seeds or [1]]


def _part(recipes: Sequence[str], overrides: Sequence[str], options: argparse.Namespace) -> str:
    """The override that has all runs read the part of the corpus that --share asks for."""
    recipe = Path(recipes[0]) if recipes else _TRANSLATION / "l10n-base.yaml"
    data = load_recipe(recipe, overrides).data
    check_files(data)
    return f"data.path={json.dumps(str(part_of(data, options.share, options.output / 'corpus')))}"


def _list_experiments(asked: Sequence[str], overrides: Sequence[str], options: argparse.Namespace) -> None:
    """Each experiment with its runs and their hours."""
    listed: set[tuple[str, int]] = set()
    for name in asked:
        if _is_recipe(name):
            raise UserError(f"--list is for experiments, and {name} is a recipe; use --dry-run")
        one = experiment(name)
        print(f"{one.name}: {one.question}")
        runs = plan_experiments([name], _asked(overrides, options))
        print("\n".join(f"    {line}" for line in hours_text(runs, options.share or 1.0, listed).splitlines()))


def _background(options: argparse.Namespace) -> int:
    """Start the same command as a process of its own, which a terminal's end does not end."""
    options.output.mkdir(parents=True, exist_ok=True)
    log = options.output / LOG_FILE
    words = [word for word in options.words if word != "--background"]
    with log.open("a") as file:
        child = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    print(f"started as process {child.pid}; its words are in {log}, --status says how far it is, and")
    print(f"`kill {child.pid}` stops it after its step is saved; the same command then goes on")
    return 0


def write_curves(runs: Sequence[Run], output: Path) -> None:
    """All curves of the runs in one table."""
    rows = [row for run in runs for row in curve_rows(run.name, run.seed, read_curve(run.folder))]
    if rows:
        write_csv(output / CURVES_FILE, rows)


def _finished(options: argparse.Namespace, runs: Sequence[Run]) -> list[Finished]:
    """The finished ones of the runs; without any given, all in the output folder."""
    models = list(dict.fromkeys(run.name for run in runs)) or None
    found = finished_runs(
        options.output, models, options.seeds or ([1] if models and not options.report_only else None)
    )
    others = {run.folder for run in runs if run.progress()[0] == "other"}
    for folder in sorted(others):
        print(f"{folder} has results of another recipe; they are left out", file=sys.stderr)
    # A training to its end has metrics after each of its parts.
    unfinished = {run.folder for run in runs if run.to_end and run.progress()[0] != "finished"}
    return [run for run in found if run.folder not in others | unfinished]


def write_report(
    results: Results,
    roles: Roles,
    runs: Sequence[Run],
    alone: Sequence[Finished],
    paper: Sequence[Path],
    options: argparse.Namespace,
    folder: Path,
) -> None:
    """Write the report, its tables and its pictures into a folder."""
    from translation_scaling.draw import draw
    from translation_scaling.learning import Learning
    from translation_scaling.plans import predict
    from translation_scaling.report import report
    from translation_scaling.sizes import size_of

    folder.mkdir(parents=True, exist_ok=True)
    measured = roles.only(results.models)
    learnt = [one for one in map(Learning.of, results.runs) if one.curve.best is not None]
    write_csv(folder / RESULTS_FILE, (row for run in results.all_runs for row in run.rows()))
    write_csv(folder / RUNS_FILE, (run.cost_row() for run in [*results.all_runs, *alone]))
    write_csv(folder / BASELINES_FILE, (row for run in alone for row in run.rows()))
    write_csv(folder / LEARNING_FILE, (row for one in learnt for row in one.rows()))
    differences = compare_all(results, compared(results, measured))
    write_csv(folder / DIFFERENCES_FILE, (one.row() for one in differences))
    transfer = with_baselines(results, alone)
    draw(folder, results, measured, differences, learnt, transfer)
    recipes = dict.fromkeys((run.recipe, run.overrides) for run in runs)
    sizes = list(dict.fromkeys([*(size_of(path, own) for path, own in recipes), *map(size_of, paper)]))
    plans = [predict(path, ["--device", options.device]) for path in paper]
    done = {run.folder for run in results.all_runs}
    unfinished = [run.title for run in runs if run.folder not in done]
    text = report(results, measured, sizes, plans, options.device, unfinished, differences, learnt, transfer)
    (folder / REPORT_FILE).write_text(text, encoding="utf-8")
    print(f"report  {folder / REPORT_FILE}", flush=True)


def _draw_again(folder: Path, options: argparse.Namespace) -> int:
    """Draw the pictures of a report from its tables."""
    from translation_scaling.draw import draw
    from translation_scaling.tables import read_differences, read_learning, read_results

    results = Results(read_results(folder / RESULTS_FILE))
    baselines = folder / BASELINES_FILE
    transfer = with_baselines(results, read_results(baselines)) if baselines.exists() else None
    roles = roles_of(results.models, options.baseline, options.pair)
    differences, learnt = (
        read_differences(folder / DIFFERENCES_FILE),
        read_learning(folder / LEARNING_FILE, results.runs),
    )
    draw(folder, results, roles, differences, learnt, transfer)
    print(f"pictures in {folder}")
    return 0


def _list(runs: Sequence[Run]) -> None:
    """The work to be done, one line per run."""
    words = {"finished": "is finished", "begun": "was begun", "new": "to be run", "other": "may raise an error"}
    for number, run in enumerate(runs, 1):
        progress, detail = run.progress()
        print(f"[{number}/{len(runs)}] {run.title}: {words[progress]}{', ' + detail if detail else ''}")
        print(f"    python -m hf_gpipe.train {' '.join(run.arguments)}")


def _at_least_one(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least 1")
    return int(word)


def _paper_recipes(options: argparse.Namespace) -> list[Path]:
    if options.paper is not None:
        return [Path(path) for path in options.paper]
    return [path for name in PAPER_RECIPES if (path := _TRANSLATION / f"{name}.yaml").exists()]


def _parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "recipes",
        nargs="*",
        metavar="RECIPE",
        help="recipes (.yaml) to compare, or names of experiments; key=value overrides a key of all",
    )
    parser.add_argument("--list", action="store_true", help="print the experiments, their runs and the hours of each")
    parser.add_argument("--status", action="store_true", help="print how far each run is and when it will end")
    parser.add_argument("--background", action="store_true", help="go on in a process that outlives the terminal")
    parser.add_argument("--to-end", action="store_true", help="train recipes until they are at their end")
    parser.add_argument("--share", type=float, help="train on this share of each language's pairs, such as 0.25")
    parser.add_argument(
        "--sweep-steps",
        type=_at_least_one,
        default=SWEEP_STEPS,
        metavar="N",
        help=f"updates of each run that tries a learning rate; default: {SWEEP_STEPS}",
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="folder that survives: copies of checkpoints, curves")
    parser.add_argument(
        "--at-once", type=_at_least_one, default=1, metavar="N", help="runs that are trained at a time; default: 1"
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="values of training.seed; default: 1")
    parser.add_argument("--output", type=Path, default=Path("outputs/scaling"), help="folder; default: outputs/scaling")
    parser.add_argument("--baseline", metavar="NAME", help="the smallest model; default: the recipe named base")
    parser.add_argument(
        "--pair", nargs=2, metavar=("DEEP", "WIDE"), help="the two of one size; default: those named deep and wide"
    )
    parser.add_argument("--report-only", action="store_true", help="train nothing; report on what is finished")
    parser.add_argument(
        "--draw", type=Path, metavar="DIR", help="draw the pictures of a report from its tables, no more"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs and how far each has come")
    parser.add_argument("--device", default="tpu-v3", help="of the planner's predictions; default: tpu-v3, the paper's")
    parser.add_argument(
        "--paper", nargs="*", metavar="RECIPE", help="recipes to plan and count; default: the five sizes of the paper"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
