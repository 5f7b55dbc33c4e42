"""Models of many languages beside baselines that were trained on one language alone, as in the paper's figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from translation_scaling.results import Finished, Results, pair_of

BASELINE, BASELINES_FILE = "one language alone", "baselines.csv"


def with_baselines(results: Results, alone: Sequence[Finished]) -> Results | None:
    """The runs on those languages that have a baseline, and the baselines together as one more model.

    Args:
        results: of the runs on many languages.
        alone: runs on one language each.

    Returns:
        None: no language has a baseline of finite scores.

    Raises:
        DataError: a baseline was not trained and tested on the pairs that the others have of its language.
    """
    of_all = results.runs[0].per_language
    single = [
        run for run in alone if run.is_finite and len(run.per_language) == 1 and set(run.per_language) < set(of_all)
    ]
    seeds: dict[int, list[Finished]] = {}
    for run in single:
        seeds.setdefault(run.seed, []).append(run)
    if not seeds:
        return None
    common = set.intersection(*({next(iter(run.per_language)) for run in runs} for runs in seeds.values()))
    if not common:
        return None
    together = [_together([run for run in runs if set(run.per_language) <= common], of_all) for runs in seeds.values()]
    return Results([*(run.only(common) for run in results.runs), *together])


def _together(runs: Sequence[Finished], of_all: Mapping[str, Mapping[str, Any]]) -> Finished:
    """Baselines of one seed as one run."""
    scores = {language: one for run in runs for language, one in run.per_language.items()}
    # Alone each language is the one with the most pairs, so its bucket is that among all.
    scores = {language: {**one, "bucket": of_all[language]["bucket"]} for language, one in scores.items()}
    translations = sorted((row for run in runs for row in run.translations), key=pair_of)
    return runs[0].with_scores(scores, translations if all(run.translations for run in runs) else (), BASELINE)
