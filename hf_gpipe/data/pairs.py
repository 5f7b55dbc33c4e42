"""A parallel corpus: pairs of a source and a target text, split into train, validation and test without leaks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hf_gpipe.data.deterministic import stable_fraction, stable_random
from hf_gpipe.errors import DataError

ENGLISH = "en"
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True)
class Pair:
    """One example. `source` already carries its target tag, where there is one.

    `language` is the side that is not English, the key of reports per language. Pairs with equal `split_key` always
    land in the same split.
    """

    source: str
    target: str
    language: str
    split_key: str


@dataclass(frozen=True)
class Corpus:
    """The three splits, the languages in the order they were asked for, and the target tags the sources may carry."""

    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]
    languages: list[str]
    target_tags: list[str]

    def texts(self, max_pairs: int | None = None) -> list[str]:
        """The sources and targets of the training split, of so many drawn pairs: what a tokenizer may be trained on."""
        pairs = self.train
        if max_pairs is not None and max_pairs < len(pairs):
            drawn = stable_random("texts", max_pairs).sample(range(len(pairs)), max_pairs)
            pairs = [pairs[place] for place in sorted(drawn)]
        return [text for pair in pairs for text in (pair.source, pair.target)]


def language_tag(language: str) -> str:
    """The token in front of a source that asks for `language` as the target: "<2de>"."""
    return f"<2{language}>"


def tagged(source: str, language: str) -> str:
    """`source` with the tag that asks for `language`: "<2de> in three days"."""
    return f"{language_tag(language)} {source}"


def check_fractions(validation_fraction: float, test_fraction: float) -> None:
    """Raises DataError when a fraction is not in [0, 1), or when they leave nothing to train on."""
    for name, fraction in (("validation_fraction", validation_fraction), ("test_fraction", test_fraction)):
        if not 0 <= fraction < 1:
            raise DataError(f"{name} is {fraction}; it must be at least 0 and less than 1")
    if validation_fraction + test_fraction >= 1:
        raise DataError(
            f"validation_fraction {validation_fraction} and test_fraction {test_fraction} leave nothing to train on; "
            "their sum must be less than 1"
        )


def split_of(key: str, validation_fraction: float, test_fraction: float) -> str:
    """The split of pairs with this split key: "train", "validation" or "test", by a hash of the key alone."""
    position = stable_fraction(key)
    if position < test_fraction:
        return "test"
    return "validation" if position < validation_fraction + test_fraction else "train"


def split_pairs(
    pairs: Iterable[Pair],
    *,
    languages: list[str],
    validation_fraction: float,
    test_fraction: float,
    target_tags: list[str] | None = None,
) -> Corpus:
    """Distributes `pairs` over the splits by a hash of their split key alone.

    Neither the seed nor the other pairs have a say, so an example keeps its split when the corpus grows, and a model
    trained on one corpus has never seen the test keys of another. The fractions are therefore met only on average.

    Raises DataError when a fraction is not in [0, 1), when they leave nothing to train on, or without training pairs.
    """
    check_fractions(validation_fraction, test_fraction)
    splits: dict[str, list[Pair]] = {split: [] for split in SPLITS}
    for pair in pairs:
        splits[split_of(pair.split_key, validation_fraction, test_fraction)].append(pair)
    train, validation, test = (splits[split] for split in SPLITS)
    if not train:
        raise DataError(
            f"the corpus has no training pairs ({len(validation)} for validation, {len(test)} for test); "
            "ask for more examples or smaller validation_fraction and test_fraction"
        )
    return Corpus(train, validation, test, languages, target_tags or [])
