"""The report in Markdown."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from bench.report import table

from hf_gpipe.text import size_text
from translation_scaling.differences import FEWEST_LANGUAGES, RESAMPLES, Difference, TestPairs, compare_all
from translation_scaling.draw import BUCKETS_FILE, LANGUAGES_FILE, TRANSFER_FILE
from translation_scaling.learning import Learning, Size, learning
from translation_scaling.results import BASELINE, MEASURES, RESULTS_FILE, RUNS_FILE, Finished, Measure, Results, largest
from translation_scaling.runs import differing_keys, flat

#: Of each run, or where it runs and what it says about itself: no difference between models.
_OF_A_RUN = ("training.seed", "training.output_dir")

_WHAT = """\
{num_languages} languages, {num_pairs} training pairs in all, from {most} to {fewest}. Seeds of each model: {seeds}.
A seed decides the initial weights, the order of rows and dropout; the pairs are the same for all. Updates: {updates}.
Every score is in [{results}]({results}), a row a language, and every cost in [{runs}]({runs}), a row a run. Written by
scripts/scaling.py on {machine}, Python {python}, torch {torch}, transformers {transformers}."""

_EXPLANATION = """\
The paper compares BLEU, which says little of texts of a few words; it is in [{results}]({results}). Models are
compared here by the negative log-likelihood (NLL) of the references, in nats a character, and by chrF (0 to 100) minus
that of a copy of the source.

Buckets are thirds of the languages by training pairs ({sizes}). A model's score in a bucket is the mean over its
languages, each of which counts alike, and over seeds; beside it the mean of each seed. A difference is paired:
first the mean over seeds for each language, then the difference, then the mean over languages. Its 95 % interval is
a percentile bootstrap over {what} ({resamples} resamples; none for fewer than {fewest} languages): it holds their
chance, not that of the seeds. Better or worse is said where the interval excludes 0; where it includes 0 no difference
is shown, which does not say that there is none. `low - high` is the difference on low-resource languages minus that on
high-resource ones."""

_TRANSFER = """\
The paper's figure shows gains over bilingual baselines. Here these are models of the base's shape, each trained to its
end on one of {num_languages} of the languages alone, from {most:,} training pairs to {fewest:,}, with a vocabulary of
its own."""

_COST = """\
Of each run. `body` is the matrices of attention and feed-forward layers, `one table` vocabulary times width. `tokens/s`
counts tokens of sources and targets, without padding, evaluations and checkpoints; `s/update` is the median over the
lines of the log. One step was measured after the training, and its bubble; the planner's time beside it is for the same
mini-batch on this machine's rates. `peak memory` is the largest process's, libraries included (resident, on a GPU what
torch allocated); the planner's is for a mini-batch of the longest rows, without the libraries. `wall` is all starts of
the command, evaluation included. Of a run that was resumed, updates and times are those of all its parts, less what lay
between an interruption and the line of the log before it; memory is that of the last part."""


def report(
    results: Results,
    runs: Sequence[Finished],
    unfinished: Sequence[str],
    differences: Sequence[Difference],
    learnt: Sequence[Learning],
    transfer: Results | None,
    *,
    has_roles: bool,
) -> str:
    """All sections.

    Args:
        results: of the runs.
        runs: those that are compared.
        unfinished: titles of runs that were asked for and are not there.
        differences: between their models.
        learnt: the runs that have validation losses.
        transfer: the results with baselines of one language, if there are any.
        has_roles: whether some models stand for the paper's.
    """
    parts = [
        f"# {'Depth against width in translation' if has_roles else 'Translation'} from many languages",
        _what(results, runs, unfinished),
        "## Quality by resource",
        _explanation(results),
        *(_levels(results, measure) for measure in MEASURES),
        f"![Scores and differences by bucket]({BUCKETS_FILE})",
        *([_differences(differences)] if differences else []),
        *([f"![Gain over languages]({LANGUAGES_FILE})"] if has_roles else []),
        *(["## Many languages against one", _transfer(transfer)] if transfer is not None else []),
        *(["## Learning", learning(learnt, runs[0].recipe)] if learnt else []),
        "## Cost",
        f"{_COST}\n\n{_costs(runs)}",
        "## What the models differ in",
        _settings(runs),
    ]
    return "\n\n".join(parts) + "\n"


def _what(results: Results, runs: Sequence[Finished], unfinished: Sequence[str]) -> str:
    steps = {
        model: dict.fromkeys(str(run.cost["num_steps"]) for run in runs if run.model == model)
        for model in results.models
    }
    pairs, languages = results.training_pairs, results.languages
    text = _WHAT.format(
        **{"num_languages": len(languages), "num_pairs": pairs.sum()},
        **{"most": f"{pairs[0]} ({languages[0]})", "fewest": f"{pairs[-1]} ({languages[-1]})"},
        seeds="; ".join(f"{model}: {', '.join(map(str, results.seeds(model)))}" for model in results.models),
        updates="; ".join(f"{model}: {', '.join(count)}" for model, count in steps.items()),
        **{"results": RESULTS_FILE, "runs": RUNS_FILE, "machine": platform.machine()},
        **{"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
    )
    left_out = {
        "Diverged, with scores that are no numbers": [f"{model}, seed {seed}" for model, seed in results.diverged],
        "Not finished": unfinished,
    }
    lines = [f"**{why}, and so not in any number below: {'; '.join(own)}.**" for why, own in left_out.items() if own]
    return "\n\n".join([text, *lines])


def _explanation(results: Results) -> str:
    sizes = ", ".join(f"{bucket} {int(results.places(bucket).sum())}" for bucket in results.bucket_names)
    pairs = TestPairs.of(results)
    what = "languages" if pairs is None else f"languages and over the {pairs.num_sentences:,} English test sentences"
    numbers = {"resamples": RESAMPLES, "fewest": FEWEST_LANGUAGES}
    return _EXPLANATION.format(sizes=sizes, what=what, results=RESULTS_FILE, **numbers)


def _levels(results: Results, measure: Measure) -> str:
    header = ["model", *(f"{bucket} (seeds)" for bucket in (*results.bucket_names, "all"))]
    rows = []
    for model in results.models:
        scores, row = results.scores(model, measure), [model]
        for bucket in (*results.bucket_names, None):
            of_seeds = scores[:, results.places(bucket)].mean(axis=1)
            mean, *seeds = (f"{value:.{measure.digits}f}" for value in (of_seeds.mean(), *of_seeds))
            row.append(f"{mean} ({' '.join(seeds)})")
        rows.append(row)
    return f"{measure.title}, {measure.direction}:\n\n{table(header, rows)}"


def _transfer(transfer: Results) -> str:
    sizes, models = transfer.training_pairs, [name for name in transfer.models if name != BASELINE]
    text = _TRANSFER.format(num_languages=len(sizes), most=sizes[0], fewest=sizes[-1])
    differences = _differences(compare_all(transfer, [(name, BASELINE) for name in models]))
    return f"{text}\n\n{differences}\n\n![Gain over models of one language]({TRANSFER_FILE})"


def _differences(differences: Sequence[Difference]) -> str:
    header = [
        *("difference", "measure", "bucket", "mean", "95 % interval", "each seed", "seeds with its sign"),
        *("languages better", "outcome"),
    ]
    rows = []
    for difference in differences:
        digits, better, interval = difference.measure.digits, difference.num_better, difference.interval
        low_high = "-" if interval is None else "[{0:+.{2}f}, {1:+.{2}f}]".format(*interval, digits)
        models = f"{difference.first} - {difference.second}"
        seeds = " ".join(f"{value:+.{digits}f}" for value in difference.per_seed.values())
        rows.append(
            [
                *(models, difference.measure.title, difference.bucket or "all", f"{difference.mean:+.{digits}f}"),
                *(low_high, seeds, difference.seeds_agree),
                *("" if better is None else f"{better} of {difference.num_languages}", difference.outcome),
            ]
        )
    return f"Differences:\n\n{table(header, rows)}"


def _costs(runs: Sequence[Finished]) -> str:
    header = [
        *("run", "parameters", "body", "one table", "K", "M", "tokens/s", "s/update", "step measured", "step planned"),
        *("bubble", "bubble planned", "peak memory", "memory planned", "training", "wall"),
    ]
    rows = []
    for run in runs:
        cost, predicted, size = run.cost, run.predicted, Size.of(run.recipe)
        peaks = ("-" if peak is None else size_text(peak) for peak in (largest(cost), largest(predicted)))
        rows.append(
            [
                f"{run.model}, seed {run.seed}{' (resumed)' if cost.get('resumed_from_step') else ''}",
                *(f"{cost['num_parameters']:,}", f"{size.body:,}", f"{size.table:,}", cost["num_stages"]),
                *(cost["num_micro_batches"], _number(cost, "tokens_per_second", "{:,.0f}")),
                *(_number(cost, "seconds_per_step", "{:.3f}"), _number(cost, "step_seconds", "{:.3f} s")),
                *(_number(predicted, "step_seconds", "{:.3f} s"), _number(cost, "bubble", "{:.1%}")),
                *(_number(predicted, "bubble", "{:.1%}"), *peaks, _number(cost, "training_seconds", "{:.0f} s")),
                f"{run.all_wall_seconds:.0f} s",
            ]
        )
    return table(header, rows)


def _number(values: dict[str, Any], key: str, pattern: str) -> str:
    return "-" if values.get(key) is None else pattern.format(values[key])


def _settings(runs: Sequence[Finished]) -> str:
    """The keys of the resolved recipes that are not the same in all runs."""
    first = {run.model: flat(run.recipe) for run in reversed(runs)}
    models = list(dict.fromkeys(run.model for run in runs))
    keys = dict.fromkeys(key for model in models for key in first[model])
    rows = [
        [key, *(first[model].get(key, "-") for model in models)]
        for key in keys
        if key not in _OF_A_RUN and len({repr(first[model].get(key)) for model in models}) > 1
    ]
    lines = ["Of the resolved recipes, which lie beside each run's results:", ""]
    lines.append(table(["key", *models], rows) if rows else "Nothing but their names.")
    for run in runs:
        changed = [key for key in differing_keys(first[run.model], flat(run.recipe)) if key not in _OF_A_RUN]
        if changed:
            lines += ["", f"**{run.model}: seed {run.seed} was run with other values of {', '.join(changed)}.**"]
    return "\n".join(lines)
