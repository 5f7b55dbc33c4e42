"""The paper's findings beside what was measured (GPipe, arXiv 1811.06965, section 5).

Every word about an outcome follows from the numbers: an interval that excludes 0 says better or worse, one that
includes 0 says that no difference is shown, which is not that there is none. Nothing here passes or fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_gpipe.errors import listed
from translation_scaling.differences import Contrast, Difference, Interval, compare, contrast, per_language
from translation_scaling.results import MEASURES, Measure, Results

_MOST_NAMES = 12


@dataclass(frozen=True)
class Roles:
    """Which model stands for which of the paper's: its 400M, and its two of 1.3B. None: there is none."""

    base: str | None
    deep: str | None
    wide: str | None

    @property
    def is_any(self) -> bool:
        """Whether some model has a role."""
        return any((self.base, self.deep, self.wide))

    @property
    def large(self) -> tuple[str, ...]:
        return tuple(name for name in (self.deep, self.wide) if name is not None)

    def only(self, models: Sequence[str]) -> Roles:
        """Without the models that are not among `models`."""
        return Roles(*(name if name in models else None for name in (self.base, self.deep, self.wide)))

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The pairs of models to compare: the large ones with the base, and with each other."""
        found = [(name, self.base) for name in self.large if self.base is not None]
        if self.deep is not None and self.wide is not None:
            found.append((self.deep, self.wide))
        return tuple((first, second) for first, second in found if second is not None)


@dataclass(frozen=True)
class Claim:
    """A finding of the paper, and the lines that say what was found here."""

    title: str
    lines: tuple[str, ...]


def claims(results: Results, roles: Roles) -> list[Claim]:
    """All four, in the paper's order."""
    return [
        Claim("Going from 400M to 1.3B parameters helps every language.", _helps_every_language(results, roles)),
        Claim(
            "The deep and the wide model are about equal on high-resource languages.",
            _on_bucket(results, roles, "high"),
        ),
        Claim(
            "The deep model is better by large margins on low-resource languages.",
            (*_on_bucket(results, roles, "low"), *_low_against_high(results, roles)),
        ),
        Claim(
            "3B and 6B parameters give diminishing returns.",
            ("Not measured: of larger models the report has the planner's predictions alone, if any.",),
        ),
    ]


def compared(results: Results, roles: Roles) -> tuple[tuple[str, str], ...]:
    """The pairs of models that a report compares: those of the roles, or each with the first if there is no role."""
    return roles.pairs or tuple((model, results.models[0]) for model in results.models[1:])


def outcome(difference: Difference) -> str:
    """Describe what an interval shows about two models."""
    if difference.interval is None:
        return f"{difference.num_languages} languages are too few for an interval"
    if not difference.interval.excludes_zero:
        return f"no difference between {difference.first} and {difference.second} is shown"
    better = "better" if difference.gain > 0 else "worse"
    return f"{difference.first} is {better} than {difference.second}"


def numbers(difference: Difference) -> str:
    """Mean, interval and seeds of a difference."""
    digits = difference.measure.digits
    seeds = "; ".join(f"seed {seed}: {value:+.{digits}f}" for seed, value in difference.per_seed.items())
    return f"{difference.mean:+.{digits}f}{interval_text(difference.interval, digits)}" + (
        f" ({seeds})" if seeds else ""
    )


def interval_text(interval: Interval | None, digits: int) -> str:
    """An interval in brackets; nothing where there is none."""
    return "" if interval is None else f" [{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]"


def seeds_agree(difference: Difference) -> str:
    """Whether every seed has the sign of the mean."""
    of_seeds = list(difference.per_seed.values())
    if len(of_seeds) < 2:
        return "fewer than two seeds of both models: the chance of the seed is not known"
    same = sum((value > 0) - (value < 0) == (difference.mean > 0) - (difference.mean < 0) for value in of_seeds)
    return f"the sign is that of the mean in {same} of {len(of_seeds)} seeds"


def _helps_every_language(results: Results, roles: Roles) -> tuple[str, ...]:
    if roles.base is None or not roles.large:
        return (_missing(roles, "base and deep or wide"),)
    lines = []
    for name in roles.large:
        for measure in MEASURES:
            difference = compare(results, name, roles.base, measure)
            lines.append(
                f"{measure.title}: {name} beats {roles.base} in {difference.num_better} of {difference.num_languages} "
                f"languages{_exceptions(results, name, roles.base, measure)}. {name} minus {roles.base} is on average "
                f"{numbers(difference)}: {outcome(difference)}; {seeds_agree(difference)}."
            )
    return tuple(lines)


def _exceptions(results: Results, first: str, second: str, measure: Measure) -> str:
    """The languages that a larger model does not help."""
    values = per_language(results, first, second, measure) * measure.sign
    worse = [language for language, gain in zip(results.languages, values, strict=True) if gain < 0]
    num_equal = int((values == 0).sum())
    if not worse and not num_equal:
        return ", which is all of them"
    parts = [f"equal in {num_equal}"] if num_equal else []
    if worse:
        parts.append(f"worse in {listed(worse, _MOST_NAMES)}")
    return f" ({'; '.join(parts)})"


def _on_bucket(results: Results, roles: Roles, bucket: str) -> tuple[str, ...]:
    if roles.deep is None or roles.wide is None:
        return (_missing(roles, "deep and wide"),)
    if bucket not in results.bucket_names:
        return (f"Not measured: there are no {bucket}-resource languages.",)
    lines = []
    for measure in MEASURES:
        difference = compare(results, roles.deep, roles.wide, measure, bucket)
        lines.append(
            f"{measure.title}, {difference.num_languages} {bucket}-resource languages: {roles.deep} minus {roles.wide} "
            f"is {numbers(difference)}{_relative(results, difference)}: {outcome(difference)}; "
            f"{seeds_agree(difference)}."
        )
    return tuple(lines)


def _relative(results: Results, difference: Difference) -> str:
    """A difference as a share of the second model's own score, whatever the sign of that."""
    score = results.scores(difference.second, difference.measure)[:, results.places(difference.bucket)].mean()
    return (
        f", {difference.mean / abs(score):+.1%} of the size of {difference.second}'s "
        f"{score:.{difference.measure.digits}f}"
        if score
        else ""
    )


def _low_against_high(results: Results, roles: Roles) -> tuple[str, ...]:
    if roles.deep is None or roles.wide is None or not {"low", "high"} <= set(results.bucket_names):
        return ()
    lines = []
    for measure in MEASURES:
        found = contrast(results, roles.deep, roles.wide, measure, "low", "high")
        lines.append(
            f"{measure.title}: what {roles.deep} gains over {roles.wide} on low-resource languages minus what it "
            f"gains on high-resource ones is {found.gain:+.{measure.digits}f}"
            f"{interval_text(found.interval, measure.digits)}: {contrast_outcome(found, roles.deep)}."
        )
    return tuple(lines)


def contrast_outcome(found: Contrast, deep: str) -> str:
    """Describe what the interval of a contrast shows."""
    if found.interval is None:
        return "too few languages for an interval"
    if not found.interval.excludes_zero:
        return "no difference between the two is shown"
    return f"the low-resource languages are where {deep} gains {'more' if found.gain > 0 else 'less'}"


def _missing(roles: Roles, what: str) -> str:
    return f"Not measured: it needs runs of {what} (base: {roles.base}, deep: {roles.deep}, wide: {roles.wide})."
