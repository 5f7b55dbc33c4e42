"""Pictures: quality over the languages, as in the paper's figure, and over the buckets; the runs' curves."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from translation_scaling.differences import LOW_HIGH, Difference, per_language
from translation_scaling.learning import CURVES_PICTURE, Learning
from translation_scaling.results import BASELINE, MEASURES, Measure, Results
from translation_scaling.roles import Roles

LANGUAGES_FILE, BUCKETS_FILE, TRANSFER_FILE = "languages.png", "buckets.png", "transfer.png"

# Colours that stay apart for colour-blind readers and in greyscale.
_COLOURS = ("#9a9a9a", "#2a7f62", "#d98b2b", "#5b9bd5", "#8e5ea2", "#b5525c")
_OF_PAIRS = ("#2a7f62", "#d98b2b", "#3b3b6d", "#b5525c")
_MOST_TICKS = 16
_WINDOW = 0.06
"""Of the smoothing, as a share of the languages."""


def smoothed(values: np.ndarray, width: float) -> np.ndarray:
    """`values` (n,) averaged with Gaussian weights over neighbours; `width` is the standard deviation in places."""
    places = np.arange(len(values))
    weights = np.exp(-0.5 * ((places[:, None] - places[None, :]) / max(width, 1e-9)) ** 2)
    averages: np.ndarray = (weights @ values) / weights.sum(axis=1)
    return averages


def draw(
    folder: Path,
    results: Results,
    roles: Roles,
    differences: Sequence[Difference],
    learnt: Sequence[Learning],
    transfer: Results | None,
) -> None:
    """All pictures of a report, into its folder."""
    draw_buckets(folder / BUCKETS_FILE, results, differences)
    if roles.base is not None and roles.large:
        draw_languages(folder / LANGUAGES_FILE, results, roles.large, roles.base)
    if learnt:
        draw_curves(folder / CURVES_PICTURE, learnt)
    if transfer is not None:
        draw_languages(folder / TRANSFER_FILE, transfer, results.models, BASELINE)


def draw_languages(path: Path, results: Results, models: Sequence[str], other: str) -> None:
    """The gain of models over another one in every language, the one with the most training pairs first."""
    figure = _figure((10.5, 7.4))
    panels = figure.subplots(len(MEASURES), 1, sharex=True)
    places = np.arange(1, len(results.languages) + 1)
    for panel, measure in zip(panels, MEASURES, strict=True):
        for name in models:
            gains = measure.sign * per_language(results, name, other, measure)
            colour = _colour(results, name)
            panel.plot(places, gains, "o", color=colour, alpha=0.35, markersize=4, markeredgewidth=0)
            panel.plot(places, smoothed(gains, max(1.0, _WINDOW * len(gains))), color=colour, linewidth=2.2, label=name)
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set_title(f"{measure.title}: gain over {other} (above 0 is better)", loc="left", fontsize=11)
        _mark_buckets(panel, results)
        _plain(panel)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(models), frameon=False)
    panels[-1].set_xlabel(
        "languages with their training pairs, the most first; a dot is a language, a line is smoothed"
    )
    ticks = np.unique(np.linspace(0, len(places) - 1, min(_MOST_TICKS, len(places))).round().astype(int))
    panels[-1].set_xticks(places[ticks], [f"{results.languages[i]}\n{results.training_pairs[i]}" for i in ticks])
    figure.savefig(path)


def draw_buckets(path: Path, results: Results, differences: Sequence[Difference]) -> None:
    """Above, each model's score in each bucket, a dot a seed; below, differences with their intervals."""
    figure = _figure((11.0, 7.4))
    panels = figure.subplots(2 if differences else 1, len(MEASURES), squeeze=False)
    for column, measure in enumerate(MEASURES):
        _bars(panels[0, column], results, measure)
        if differences:
            _intervals(
                panels[1, column], results, [difference for difference in differences if difference.measure == measure]
            )
    # Beside the panels, where no score lies under it.
    for row, place in zip(panels, ("outside upper center", "outside lower center"), strict=False):
        handles, labels = row[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc=place, ncols=len(labels), frameon=False)
    figure.savefig(path)


def _different_parts(names: Sequence[str]) -> list[str]:
    """The words in which names with seeds differ: of "l10n-deep, seed 1" and "l10n-wide, seed 1" deep and wide."""
    first = commonprefix(names).rfind("-") + 1  # noqa: RUF071  # they are names, and no paths
    seeds = {name.rpartition(", ")[2] for name in names}
    return [(name.rpartition(", ")[0] if len(seeds) == 1 else name)[first:].replace("-", " ") for name in names]


def draw_curves(path: Path, runs: Sequence[Learning]) -> None:
    """Validation loss per character against updates and against operations."""
    figure = _figure((10.5, 4.6))
    panels = figure.subplots(1, 2, sharey=True)
    names = _different_parts([run.name for run in runs])
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        points, colour = run.curve.points, _COLOURS[number % len(_COLOURS)]
        operations = [run.operations_per_token * run.curve.tokens(point.step) for point in points]
        losses = [point.loss for point in points]
        panels[0].plot([point.step for point in points], losses, color=colour, label=name)
        panels[1].plot(operations, losses, color=colour)
        best = min(range(len(points)), key=losses.__getitem__)
        panels[0].plot(points[best].step, losses[best], "o", color=colour, markersize=4)
        panels[1].plot(operations[best], losses[best], "o", color=colour, markersize=4)
    for panel, title in zip(panels, ("updates", "operations (a dot is the best loss)"), strict=True):
        panel.set_xlabel(title)
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.xaxis.set_minor_formatter(NullFormatter())
        _plain(panel)
    panels[0].set_title("validation loss per character (nats)", loc="left", fontsize=11)
    figure.legend(loc="outside upper center", ncols=min(4, len(runs)), frameon=False)
    figure.savefig(path)


def _bars(panel: Axes, results: Results, measure: Measure) -> None:
    width = 0.8 / len(results.models)
    for number, model in enumerate(results.models):
        scores = results.scores(model, measure)
        for place, bucket in enumerate(results.bucket_names):
            of_seeds = scores[:, results.places(bucket)].mean(axis=1)
            x = place - 0.4 + (number + 0.5) * width
            label = model if place == 0 else None
            panel.bar(x, of_seeds.mean(), width * 0.94, color=_colour(results, model), label=label)
            panel.plot([x] * len(of_seeds), of_seeds, "o", color="black", markersize=3)
    panel.set_xticks(range(len(results.bucket_names)), _bucket_labels(results))
    panel.set_title(f"{measure.title}\n({measure.direction}; a dot is a seed)", loc="left", fontsize=10)
    _plain(panel)


def _intervals(panel: Axes, results: Results, differences: Sequence[Difference]) -> None:
    pairs = list(dict.fromkeys((difference.first, difference.second) for difference in differences))
    width = 0.7 / len(pairs)
    for difference in differences:
        if difference.bucket in (None, LOW_HIGH):
            continue
        number = pairs.index((difference.first, difference.second))
        place = results.bucket_names.index(difference.bucket)
        x, colour = place - 0.35 + (number + 0.5) * width, _OF_PAIRS[number % len(_OF_PAIRS)]
        label = f"{difference.first} - {difference.second}" if place == 0 else None
        panel.plot(x, difference.mean, "o", color=colour, label=label)
        if difference.interval is not None:
            panel.plot([x, x], (difference.interval.low, difference.interval.high), color=colour, linewidth=2)
    panel.axhline(0, color="black", linewidth=0.8)
    panel.set_xticks(range(len(results.bucket_names)), _bucket_labels(results))
    direction = differences[0].measure.direction
    panel.set_title(f"difference, with its 95 % interval ({direction})", loc="left", fontsize=10)
    _plain(panel)


def _bucket_labels(results: Results) -> list[str]:
    return [f"{bucket}\n{int(results.places(bucket).sum())} languages" for bucket in results.bucket_names]


def _mark_buckets(panel: Axes, results: Results) -> None:
    """Thin lines between the buckets, and their names at the top."""
    panel.margins(y=0.12)  # room for the names
    for bucket in results.bucket_names:
        places = np.flatnonzero(results.places(bucket)) + 1
        if places[0] > 1:
            panel.axvline(places[0] - 0.5, color="#cccccc", linewidth=0.8, linestyle=":")
        top = panel.get_xaxis_transform()
        panel.text(places.mean(), 0.98, f"{bucket} resource", transform=top, ha="center", va="top", color="#777777")


def _colour(results: Results, model: str) -> str:
    return _COLOURS[results.models.index(model) % len(_COLOURS)]


def _plain(panel: Axes) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=9)


def _figure(size: tuple[float, float]) -> Figure:
    """A figure that belongs to the caller alone; pyplot never sees it."""
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
