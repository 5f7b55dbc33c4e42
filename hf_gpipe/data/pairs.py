"""A parallel corpus: pairs of a source and a target text, split into train, validation and test without leaks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hf_gpipe.data.deterministic import stable_fraction
from hf_gpipe.errors import DataError

ENGLISH = "en"


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

    def texts(self) -> list[str]:
        """Every source and target of the training split: what a tokenizer may be trained on."""
        return [text for pair in self.train for text in (pair.source, pair.target)]


def language_tag(language: str) -> str:
    """The token in front of a source that asks for `language` as the target: "<2de>"."""
    return f"<2{language}>"


def tagged(source: str, language: str) -> str:
    """`source` with the tag that asks for `language`: "<2de> in three days"."""
    return f"{language_tag(language)} {source}"


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
    for name, fraction in (("validation_fraction", validation_fraction), ("test_fraction", test_fraction)):
        if not 0 <= fraction < 1:
            raise DataError(f"{name} is {fraction}; it must be at least 0 and less than 1")
    held_out = validation_fraction + test_fraction
    if held_out >= 1:
        raise DataError(
            f"validation_fraction {validation_fraction} and test_fraction {test_fraction} leave nothing to train on; "
            "their sum must be less than 1"
        )
    train: list[Pair] = []
    validation: list[Pair] = []
    test: list[Pair] = []
    for pair in pairs:
        position = stable_fraction(pair.split_key)
        if position < test_fraction:
            test.append(pair)
        elif position < held_out:
            validation.append(pair)
        else:
            train.append(pair)
    if not train:
        raise DataError(
            f"the corpus has no training pairs ({len(validation)} for validation, {len(test)} for test); "
            "ask for more examples or smaller validation_fraction and test_fraction"
        )
    return Corpus(train, validation, test, languages, target_tags or [])
