"""GPipe's comparison of depth and width in translation from many languages, from the runs to the report.

    python scripts/scaling.py recipes/translation/laptop-base.yaml recipes/translation/laptop-deep.yaml \\
        recipes/translation/laptop-wide.yaml --seeds 1 2 --output outputs/scaling [key=value ...]

trains every recipe with every seed (training.seed; the data stay the same), one run after the other, a seed of all
recipes first. What is finished is skipped and what was interrupted goes on from its last checkpoint, so the same
command may be given again at any time; Ctrl-C leaves everything so. A run that fails ends the command and keeps the
others' results. key=value are overrides for all recipes.

It writes into the output folder: RECIPE/seed-S/ (each run), results.csv (a row a language), runs.csv (a row a run),
report.md, languages.png and buckets.png. The paper is arXiv 1811.06965, section 5.

Exit code: 0 all is finished, 1 a run failed, 2 an error that you can correct, 75 stopped, to be given again.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from translation_scaling.claims import Roles
from translation_scaling.execute import EXIT_STOPPED, execute
from translation_scaling.results import RESULTS_FILE, RUNS_FILE, Results, finished_runs, write_csv
from translation_scaling.roles import roles_of
from translation_scaling.runs import Run, plan_runs

from hf_gpipe.errors import UserError
from hf_gpipe.recipe import load_recipe

REPORT_FILE = "report.md"
PAPER_RECIPES = ("paper-400m", "paper-1.3b-deep", "paper-1.3b-wide", "paper-3b", "paper-6b")
_TRANSLATION = Path(__file__).parents[1] / "recipes" / "translation"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    warnings.filterwarnings("ignore")
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        # Taken out first, for an option that takes several words would take them too.
        overrides = [word for word in words if _is_override(word)]
        options = _parser().parse_intermixed_args([word for word in words if not _is_override(word)])
        return _scale(options, overrides)
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _is_override(word: str) -> bool:
    return "=" in word and not word.startswith("-")


def _scale(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    recipes = [Path(word) for word in options.recipes]
    if not recipes and not options.report_only:
        raise UserError("no recipe is given; name those to compare, or give --report-only for what is there")
    for path in (paper := _paper_recipes(options)):
        load_recipe(path)
    seeds = options.seeds or [1]
    runs = plan_runs(recipes, seeds, overrides, options.output)
    if options.dry_run:
        _list(runs)
        return 0
    code = 0
    if not options.report_only:
        code = execute(runs)
    if code == EXIT_STOPPED:
        # Whoever stops it does not want to wait for a report; --report-only makes one of what is finished.
        return code
    try:
        results = _results(options, runs)
    except UserError:
        if code:
            return code
        raise
    models = [run.name for run in runs] or results.models
    write_report(results, roles_of(tuple(dict.fromkeys(models)), options.baseline, options.pair), runs, paper, options)
    return code


def _results(options: argparse.Namespace, runs: Sequence[Run]) -> Results:
    """The finished ones of the runs; without any given, all in the output folder."""
    models = list(dict.fromkeys(run.name for run in runs)) or None
    found = finished_runs(
        options.output, models, options.seeds or ([1] if models and not options.report_only else None)
    )
    others = {run.folder for run in runs if run.progress()[0] == "other"}
    for folder in sorted(others):
        print(f"{folder} has results of another recipe; they are left out", file=sys.stderr)
    results = Results([run for run in found if run.folder not in others])
    write_csv(options.output / RESULTS_FILE, (row for run in results.all_runs for row in run.rows()))
    write_csv(options.output / RUNS_FILE, (run.cost_row() for run in results.all_runs))
    return results


def write_report(
    results: Results, roles: Roles, runs: Sequence[Run], paper: Sequence[Path], options: argparse.Namespace
) -> None:
    """The report and its pictures."""
    from translation_scaling.draw import BUCKETS_FILE, LANGUAGES_FILE, draw_buckets, draw_languages
    from translation_scaling.plans import predict
    from translation_scaling.report import report
    from translation_scaling.sizes import size_of

    measured = roles.only(results.models)
    draw_buckets(options.output / BUCKETS_FILE, results, measured)
    if measured.base is not None and measured.large:
        draw_languages(options.output / LANGUAGES_FILE, results, measured)
    recipes = dict.fromkeys((run.recipe, run.overrides) for run in runs)
    sizes = [*(size_of(path, own) for path, own in recipes), *map(size_of, paper)]
    plans = [predict(path, options.device) for path in paper]
    done = {run.folder for run in results.all_runs}
    unfinished = [run.title for run in runs if run.folder not in done]
    text = report(results, measured, sizes, plans, options.device, unfinished)
    (options.output / REPORT_FILE).write_text(text, encoding="utf-8")
    print(f"report  {options.output / REPORT_FILE}", flush=True)


def _list(runs: Sequence[Run]) -> None:
    """The work to be done, one line per run."""
    words = {"finished": "is finished", "begun": "was begun", "new": "to be run", "other": "may raise an error"}
    for number, run in enumerate(runs, 1):
        progress, detail = run.progress()
        print(f"[{number}/{len(runs)}] {run.title}: {words[progress]}{', ' + detail if detail else ''}")
        print(f"    python -m hf_gpipe.train {' '.join(run.arguments)}")


def _paper_recipes(options: argparse.Namespace) -> list[Path]:
    if options.paper is not None:
        return [Path(path) for path in options.paper]
    return [path for name in PAPER_RECIPES if (path := _TRANSLATION / f"{name}.yaml").exists()]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and exit code 2, as every other error here."""
        raise UserError(f"{message}; --help lists the options")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "recipes", nargs="*", metavar="RECIPE", help="recipes to compare; key=value overrides a key of all"
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="values of training.seed; default: 1")
    parser.add_argument("--output", type=Path, default=Path("outputs/scaling"), help="folder; default: outputs/scaling")
    parser.add_argument("--baseline", metavar="NAME", help="the smallest model; default: the recipe named base")
    parser.add_argument(
        "--pair", nargs=2, metavar=("DEEP", "WIDE"), help="the two of one size; default: those named deep and wide"
    )
    parser.add_argument("--report-only", action="store_true", help="train nothing; report on what is finished")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and how far each has come")
    parser.add_argument("--device", default="tpu-v3", help="of the planner's predictions; default: tpu-v3, the paper's")
    parser.add_argument(
        "--paper", nargs="*", metavar="RECIPE", help="recipes to plan and count; default: recipes/translation/paper-*"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
