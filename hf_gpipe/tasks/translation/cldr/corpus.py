"""A multilingual parallel corpus made offline from CLDR, the locale data that Babel carries.

Every language says the same kinds of thing (templates.py), so a pair is one drawn phrase said in a language and in
English. The number of pairs may follow a power law over the languages, as in the paper's corpus of 102 languages
(GPipe, arXiv 1811.06965, section 5).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from hf_gpipe.data.deterministic import stable_fraction, stable_random
from hf_gpipe.data.splits import Corpus, split_beside
from hf_gpipe.errors import DataError, listed, nearest
from hf_gpipe.progress import progress
from hf_gpipe.recipe import DataSection
from hf_gpipe.tasks.translation.cldr.coverage import cldr_languages, own_words
from hf_gpipe.tasks.translation.cldr.locales import ENGLISH, ROOT, IsolatedLocale, known_locale
from hf_gpipe.tasks.translation.cldr.templates import TEMPLATES, Phrase
from hf_gpipe.tasks.translation.pairs import ENGLISH as ENGLISH_CODE
from hf_gpipe.tasks.translation.pairs import Pair, language_tag, tagged, texts_of

logger = logging.getLogger(__name__)

# So many draws in a row without a new pair: the language has nearly said all that it can say.
FRUITLESS_DRAWS = 500

# A warning names so many languages; 102 of them would not be read.
MOST_NAMED = 4


def cldr_corpus(data: DataSection) -> Corpus[Pair]:
    """Generates the corpus; the same section gives the same corpus in any process.

    The languages are `languages`, or the first `num_languages` that CLDR says the templates in (cldr_languages). The
    n-th in rank (from 1) gets examples_per_language / n ** power_law_exponent pairs a direction, and at least
    `min_examples_per_language`, as far as its templates can say so many different things; a shortage is logged. Ranks
    follow the order of the languages, or are dealt out by `rank_seed`. A language's draws do not depend on its rank,
    so of a language that comes to another rank the shorter list of pairs is the beginning of the longer one.
    No `templates` means all of them. `max_number` bounds the numbers of measures, prices and relative times; years
    stay within templates.YEARS. Sources carry a tag such as "<2de>" where there are several target languages, or
    where `target_tag` asks for it. Pairs are split by their English side, so that no test sentence was seen in
    training in another language, by another template or in the other direction.

    Raises DataError for an unknown language or template, or a language that has no words for any of the templates.
    """
    for name in data.templates:
        if name not in TEMPLATES:
            hint = nearest(name, TEMPLATES)
            raise DataError(f"templates: {name!r} is unknown{hint}; choose from {', '.join(TEMPLATES)}")
    direction = data.direction or "to_english"
    if data.num_languages is None:
        _check_languages(data.languages)
        languages = list(data.languages)
    else:
        languages = cldr_languages(data.num_languages, data.templates)
    smallest, largest = data.min_examples_per_language, data.examples_per_language
    targets = {"to_english": ["en"], "from_english": languages, "both": ["en", *languages]}[direction]
    with_tag = data.target_tag or len(targets) > 1
    names = list(data.templates) or list(TEMPLATES)
    rank_of = ranks(languages, data.rank_seed)
    pairs: list[Pair] = []
    shortages: list[tuple[str, int, int]] = []
    for language in progress(languages, "generating pairs", "languages"):
        asked = power_law_count(rank_of[language], largest, smallest, data.power_law_exponent)
        translations = _translations(language, names, data.max_number, asked, data.seed, direction)
        if not translations:
            raise DataError(
                f"languages: CLDR has no words in {language!r} for the templates {', '.join(names)}; "
                "remove the language or choose other templates"
            )
        if len(translations) < asked:
            shortages.append((language, len(translations), asked))
        for text, english in translations:
            if direction != "from_english":
                source = tagged(text, ENGLISH_CODE) if with_tag else text
                pairs.append(Pair(source, english, language, english, language, ENGLISH_CODE))
            if direction != "to_english":
                source = tagged(english, language) if with_tag else english
                pairs.append(Pair(source, text, language, english, ENGLISH_CODE, language))
    if shortages:
        _warn_of(shortages, len(languages))
    splits = split_beside((), pairs, data, lambda pair: pair.split_key, "pairs")
    tags = [language_tag(target) for target in targets] if with_tag else []
    return Corpus(**splits, languages=languages, target_tags=tags, texts_of=texts_of)


def power_law_count(rank: int, largest: int, smallest: int, exponent: float) -> int:
    """The number of examples of the language at `rank` (from 1): largest / rank ** exponent, at least `smallest`."""
    return max(smallest, int(largest / rank**exponent + 0.5))


def ranks(languages: Sequence[str], seed: int | None) -> dict[str, int]:
    """The rank of every language, from 1: its place among `languages`, or dealt out by `seed`.

    A seed orders the languages by a hash of seed and code, so that a language more or less moves no other by more
    than one rank.
    """
    ordered = languages
    if seed is not None:
        ordered = sorted(languages, key=lambda language: stable_fraction(f"rank\x1f{seed}\x1f{language}"))
    return {language: rank for rank, language in enumerate(ordered, start=1)}


def _translations(
    language: str, names: list[str], max_number: int, count: int, seed: int, direction: str
) -> list[tuple[str, str]]:
    """Up to `count` pairs (text in `language`, English), none of whose sources occurs twice.

    A source that has two translations is kept with the first, so that there is one right answer. The draws depend on
    the seed, the language, the templates and `max_number`, not on the other languages.
    """
    locale = IsolatedLocale(known_locale(language))
    seen: set[tuple[str, str]] = set()
    translations: list[tuple[str, str]] = []
    fruitless = 0
    for phrase in _phrases(language, names, max_number, seed):
        if len(translations) == count or fruitless == FRUITLESS_DRAWS:
            break
        fruitless += 1
        placeholder = phrase(ROOT)
        text = own_words(phrase(locale), placeholder)
        english = own_words(phrase(ENGLISH), placeholder) if text is not None else None
        if text is None or english is None:
            continue
        sources = {"to_english": {(language, text)}, "from_english": {("en", english)}}
        sources["both"] = sources["to_english"] | sources["from_english"]
        if not sources[direction] & seen:
            seen |= sources[direction]
            translations.append((text, english))
            fruitless = 0
    return translations


def _phrases(language: str, names: list[str], max_number: int, seed: int) -> Iterator[Phrase]:
    rng = stable_random("cldr", seed, language)
    while True:
        yield TEMPLATES[rng.choice(names)](rng, max_number)


def _warn_of(shortages: list[tuple[str, int, int]], num_languages: int) -> None:
    """One line, however many languages there are: those that lack the most."""
    lacking = sorted(shortages, key=lambda shortage: shortage[1] - shortage[2])
    logger.warning(
        "CLDR has fewer different pairs than asked for in %d of %d languages: %s",
        len(lacking),
        num_languages,
        listed([f"{language} {number} of {asked}" for language, number, asked in lacking], MOST_NAMED),
    )


def _check_languages(languages: Sequence[str]) -> None:
    named: dict[str, str] = {}
    for language in languages:
        locale = str(known_locale(language))
        if locale in ("en", "root"):
            raise DataError(f"languages: {language!r} cannot be one of them; English is the other side of every pair")
        if locale in named:
            raise DataError(f"languages: {named[locale]!r} and {language!r} are the same; name each language once")
        named[locale] = language
