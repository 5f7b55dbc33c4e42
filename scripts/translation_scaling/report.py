"""The report in Markdown."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import transformers
from bench.report import table

from hf_gpipe.recipe.sizes import size_text
from translation_scaling.claims import Claim, Roles, claims, interval_text, outcome
from translation_scaling.differences import FEWEST_LANGUAGES, RESAMPLES, Difference, compare_all
from translation_scaling.draw import BUCKETS_FILE, LANGUAGES_FILE, TRANSFER_FILE
from translation_scaling.learning import Learning, learning
from translation_scaling.pairs import TestPairs
from translation_scaling.plans import Predicted
from translation_scaling.results import MEASURES, RESULTS_FILE, RUNS_FILE, Finished, Measure, Results
from translation_scaling.runs import differing_keys, flat
from translation_scaling.sizes import Size
from translation_scaling.transfer import BASELINE

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
is shown, which does not say that there is none."""

_TRANSFER = """\
The paper's figure shows gains over bilingual baselines. Here these are models of the base's shape, each trained to its
end on one of {num_languages} of the languages alone, from {most:,} training pairs to {fewest:,}, with a vocabulary of
its own."""

_COUNTED = """\
Counted on the models themselves, without memory. `body` is the matrices of attention and feed-forward layers; `one
table` is vocabulary times width."""

_TIED = """\
The models here have one table for source, target and softmax, as transformers 5 ties those of T5. `untied` is what
they would have with another table for the softmax. The paper prints its sizes to one or two digits and does not say
how many tables they count."""

_COST = """\
Of each run. `tokens/s` counts tokens of sources and targets, without padding, evaluations and checkpoints;
`s/update` is the median over the lines of the log. One step was measured after the training, and its bubble; the
planner's time beside it is for the same mini-batch on this machine's rates. `peak memory` is the largest process's,
libraries included (resident, on a GPU what torch allocated); the planner's is for a mini-batch of the longest rows,
without the libraries. `wall` is all starts of the command, evaluation included. Of a run that was resumed, updates
and times are those of all its parts, less what lay between an interruption and the line of the log before it; memory
is that of the last part."""

_PLANNED = """\
By the planner, `python -m hf_gpipe.plan RECIPE --device {device} --json`, with one device a stage. Nothing of this is
measured. Rows are as long as the recipe allows, and so are the tokens a second."""


def report(
    results: Results,
    roles: Roles,
    sizes: Sequence[Size],
    plans: Sequence[Predicted],
    device: str,
    unfinished: Sequence[str],
    differences: Sequence[Difference] = (),
    learnt: Sequence[Learning] = (),
    transfer: Results | None = None,
) -> str:
    """All sections.

    Args:
        results: of the finished runs.
        roles: which model stands for which of the paper's.
        sizes: of the recipes' models.
        plans: the planner's predictions, of recipes that were not run.
        device: that they are for.
        unfinished: titles of runs that were asked for and are not there.
        differences: between their models.
        learnt: the runs that have validation losses.
        transfer: the results with baselines of one language, if there are any.
    """
    found = claims(results, roles) if roles.is_any else []
    parts = [
        "# Depth against width in translation from many languages" if found else "# Translation from many languages",
        _what(results, unfinished),
        *(["## The paper's findings, and what was measured"] if found else []),
        *(_claim(number, claim) for number, claim in enumerate(found, 1)),
        "## Quality by resource",
        _explanation(results),
        *(_levels(results, measure) for measure in MEASURES),
        f"![Scores and differences by bucket]({BUCKETS_FILE})",
        *([_differences(differences)] if differences else []),
        *([f"![Gain over languages]({LANGUAGES_FILE})"] if roles.pairs else []),
        *(["## Many languages against one", _transfer(transfer)] if transfer is not None else []),
        *(["## Learning", learning(learnt)] if learnt else []),
        *(["## Parameters", _parameters(sizes)] if sizes else []),
        "## Cost",
        _costs(results, roles),
        *(["## What the planner says of larger models", _plans(plans, device)] if plans else []),
        "## What the models differ in",
        _settings(results),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _what(results: Results, unfinished: Sequence[str]) -> str:
    steps = {
        model: ", ".join(map(str, dict.fromkeys(run.cost["num_steps"] for run in results.of_model(model))))
        for model in results.models
    }
    pairs, languages = results.training_pairs, results.languages
    text = _WHAT.format(
        num_languages=len(languages),
        num_pairs=pairs.sum(),
        most=f"{pairs[0]} ({languages[0]})",
        fewest=f"{pairs[-1]} ({languages[-1]})",
        seeds="; ".join(f"{model}: {', '.join(map(str, results.seeds(model)))}" for model in results.models),
        updates="; ".join(f"{model}: {count}" for model, count in steps.items()),
        results=RESULTS_FILE,
        runs=RUNS_FILE,
        machine=platform.machine(),
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
    )
    if results.diverged:
        titles = "; ".join(f"{run.model}, seed {run.seed}" for run in results.diverged)
        text += f"\n\n**Diverged, with scores that are no numbers, and so not in any number below: {titles}.**"
    if unfinished:
        text += f"\n\n**Not finished, and so not in any number below: {'; '.join(unfinished)}.**"
    return text


def _claim(number: int, claim: Claim) -> str:
    return "\n".join([f"**{number}. {claim.title}**", "", *(f"- {line}" for line in claim.lines)])


def _explanation(results: Results) -> str:
    sizes = ", ".join(f"{bucket} {int(results.places(bucket).sum())}" for bucket in results.bucket_names)
    pairs = TestPairs.of(results)
    what = "languages" if pairs is None else f"languages and over the {pairs.num_sentences:,} English test sentences"
    return _EXPLANATION.format(
        sizes=sizes, what=what, resamples=RESAMPLES, fewest=FEWEST_LANGUAGES, results=RESULTS_FILE
    )


def _levels(results: Results, measure: Measure) -> str:
    header = ["model", *(f"{bucket} (seeds)" for bucket in results.bucket_names), "all (seeds)"]
    rows = []
    for model in results.models:
        scores = results.scores(model, measure)
        row = [model]
        for bucket in (*results.bucket_names, None):
            of_seeds = scores[:, results.places(bucket)].mean(axis=1)
            seeds = " ".join(f"{value:.{measure.digits}f}" for value in of_seeds)
            row.append(f"{of_seeds.mean():.{measure.digits}f} ({seeds})")
        rows.append(row)
    return f"{measure.title}, {measure.direction}:\n\n{table(header, rows)}"


def _transfer(transfer: Results) -> str:
    num, sizes = len(transfer.languages), transfer.training_pairs
    return "\n\n".join(
        [
            _TRANSFER.format(num_languages=num, most=sizes[0], fewest=sizes[-1]),
            _differences(compare_all(transfer, [(name, BASELINE) for name in transfer.models if name != BASELINE])),
            f"![Gain over models of one language]({TRANSFER_FILE})",
        ]
    )


def _differences(differences: Sequence[Difference]) -> str:
    header = ["difference", "measure", "bucket", "mean", "95 % interval", "each seed", "languages better", "outcome"]
    rows = [
        [
            f"{one.first} - {one.second}",
            one.measure.title,
            one.bucket or "all",
            f"{one.mean:+.{one.measure.digits}f}",
            interval_text(one.interval, one.measure.digits).strip() or "-",
            " ".join(f"{value:+.{one.measure.digits}f}" for value in one.per_seed.values()),
            f"{one.num_better} of {one.num_languages}",
            outcome(one),
        ]
        for one in differences
    ]
    return f"Differences:\n\n{table(header, rows)}"


# ---------------------------------------------------------------------- parameters


def _parameters(sizes: Sequence[Size]) -> str:
    header = [
        "recipe",
        "T(L, H, A)",
        "parameters",
        "body",
        "one table",
        "paper",
        "parameters / paper",
        "untied / paper",
    ]
    rows = [
        [
            one.name,
            one.transformer or "-",
            f"{one.total:,}",
            f"{one.body:,}",
            f"{one.table:,}",
            f"{one.paper / 1e9:g}B" if one.paper else "-",
            f"{one.total / one.paper:.3f}" if one.paper else "-",
            f"{one.with_softmax / one.paper:.3f}" if one.paper else "-",
        ]
        for one in sizes
    ]
    lines = [
        _COUNTED,
        "",
        table(header, rows),
    ]
    if any(one.is_tied and one.paper for one in sizes):
        lines += [
            "",
            _TIED,
        ]
    lines += ["", *(_same_body(pair) for pair in _deep_and_wide(sizes))]
    return "\n".join(lines).strip()


def _deep_and_wide(sizes: Sequence[Size]) -> list[tuple[Size, Size]]:
    """Recipes whose names differ in these two words."""
    by_name = {one.name: one for one in sizes}
    return [
        (one, by_name[other])
        for name, one in by_name.items()
        if name.endswith("deep") and (other := f"{name.removesuffix('deep')}wide") in by_name
    ]


def _same_body(pair: tuple[Size, Size]) -> str:
    deep, wide = pair
    rest = ": bodies are equal" if deep.body == wide.body else ""
    return (
        f"- {deep.name} minus {wide.name}: {deep.body - wide.body:+,} in the body, {deep.total - wide.total:+,} in all "
        f"({deep.total / wide.total - 1:+.3%}){rest}."
    )


# ---------------------------------------------------------------------- cost


def _costs(results: Results, roles: Roles) -> str:
    header = [
        *("run", "parameters", "K", "M", "tokens/s", "s/update", "step measured", "step planned"),
        *("bubble", "bubble planned", "peak memory", "memory planned", "training", "wall"),
    ]
    rows = [_cost_row(run) for run in results.runs]
    lines = [
        _COST,
        "",
        table(header, rows),
        *_cost_ratios(results, roles),
    ]
    return "\n".join(lines)


def _cost_row(run: Finished) -> list[str]:
    cost, predicted = run.cost, run.cost.get("predicted", {})
    return [
        f"{run.model}, seed {run.seed}{' (resumed)' if cost.get('resumed_from_step') else ''}",
        f"{cost['num_parameters']:,}",
        str(cost["num_stages"]),
        str(cost["num_micro_batches"]),
        _number(cost.get("tokens_per_second"), "{:,.0f}"),
        _number(cost.get("seconds_per_step"), "{:.3f}"),
        _number(cost.get("step_seconds"), "{:.3f} s"),
        _number(predicted.get("step_seconds"), "{:.3f} s"),
        _number(cost.get("bubble"), "{:.1%}"),
        _number(predicted.get("bubble"), "{:.1%}"),
        "-" if run.peak_bytes is None else size_text(run.peak_bytes),
        "-" if run.predicted_bytes is None else size_text(run.predicted_bytes),
        _number(cost.get("training_seconds"), "{:.0f} s"),
        f"{run.all_wall_seconds:.0f} s",
    ]


def _number(value: Any, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def _cost_ratios(results: Results, roles: Roles) -> list[str]:
    """The deep model's cost over the wide one's, medians over seeds."""
    if roles.deep is None or roles.wide is None:
        return []
    words = []
    for key, title in (
        ("tokens_per_second", "tokens a second"),
        ("seconds_per_step", "seconds an update"),
        ("bubble", "bubble"),
    ):
        values = [
            [run.cost[key] for run in results.of_model(model) if run.cost.get(key)]
            for model in (roles.deep, roles.wide)
        ]
        if all(values):
            words.append(f"{median(values[0]) / median(values[1]):.2f} times the {title}")
    return ["", f"Median over seeds, {roles.deep} has {', '.join(words)} of {roles.wide}."] if words else []


def _plans(plans: Sequence[Predicted], device: str) -> str:
    header = [
        *("recipe", "parameters", "K", "M", "schedule", "recompute", "s/step", "tokens/s", "bubble", "heaviest stage"),
        *("needs", "fits"),
    ]
    rows = [_plan_row(one) for one in plans if one.plan is not None]
    refused = [f"- {one.name}: {one.error}" for one in plans if one.plan is None]
    lines = [
        _PLANNED.format(device=device),
        "",
        table(header, rows) if rows else "",
    ]
    if refused:
        lines += ["", "Not planned:", "", *refused]
    return "\n".join(lines)


def _plan_row(one: Predicted) -> list[str]:
    plan = one.plan
    assert plan is not None
    settings, heaviest = plan["settings"], one.heaviest
    limit = plan["memory_limit_bytes"]
    recompute = settings["recompute"]
    return [
        one.name,
        f"{plan['num_parameters']:,}",
        str(settings["num_stages"]),
        str(settings["num_micro_batches"]),
        settings["schedule"],
        recompute if isinstance(recompute, str) else "by stage",
        f"{plan['step_seconds']:.2f}",
        f"{one.tokens_per_second:,.0f}",
        f"{plan['bubble']:.1%}",
        ", ".join(map(str, heaviest["stages"])),
        f"{size_text(heaviest['memory_bytes']['total'])}{'' if limit is None else f' of {size_text(limit)}'}",
        "yes" if plan["fits"] else f"no: {plan['fix']}",
    ]


# ---------------------------------------------------------------------- settings


def _settings(results: Results) -> str:
    """The keys of the resolved recipes that are not the same in all runs."""
    of_models = {model: flat(results.of_model(model)[0].recipe) for model in results.models}
    keys = dict.fromkeys(key for values in of_models.values() for key in values)
    differing = [
        key
        for key in keys
        if key not in _OF_A_RUN and len({repr(values.get(key)) for values in of_models.values()}) > 1
    ]
    lines = ["Of the resolved recipes, which lie beside each run's results:", ""]
    rows = [[key, *(str(values.get(key, "-")) for values in of_models.values())] for key in differing]
    lines.append(table(["key", *results.models], rows) if rows else "Nothing but their names.")
    for model in results.models:
        first, *others = results.of_model(model)
        for run in others:
            changed = [key for key in differing_keys(flat(first.recipe), flat(run.recipe)) if key not in _OF_A_RUN]
            if changed:
                lines += ["", f"**{model}: seed {run.seed} was run with other values of {', '.join(changed)}.**"]
    return "\n".join(lines)
