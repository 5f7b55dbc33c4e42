"""Which languages CLDR has words of their own for, and how much of each kind of phrase.

A locale without data of its own answers with the root locale's placeholders ("3 d", "M03"), or in the words of the
language that it inherits from. Neither is a translation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from babel import Locale, localedata

from hf_gpipe.data.deterministic import stable_random
from hf_gpipe.errors import DataError
from hf_gpipe.tasks.translation.cldr.locales import ROOT, IsolatedLocale
from hf_gpipe.tasks.translation.cldr.templates import TEMPLATES, Phrase

BIDI_MARKS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")

#: Phrases of each template that every language is asked to say. Their draws and numbers are fixed: the order of the
#: languages is a property of CLDR and of the templates, not of a corpus.
PROBES = 40
PROBE_MAX_NUMBER = 999


def own_words(text: str | None, placeholder: str | None) -> str | None:
    """`text` as typed text, with plain spaces and no direction marks; None where it is what the root locale says."""
    if not text or text == placeholder:
        return None
    return " ".join(BIDI_MARKS.sub("", text).split())


def cldr_languages(count: int, templates: Sequence[str] = ()) -> list[str]:
    """The `count` languages other than English that say the most of `templates` (none: of all), in that order.

    Candidates are Babel's locales that are a language alone, with neither territory nor script: "pt" and not "pt_BR",
    and of a language with several scripts the one that CLDR writes it in by default. One qualifies if it has words of
    its own for at least one of 40 fixed phrases of every template, and does not say all of them as an earlier one
    does (Haitian inherits French, "no" is "nb"). Those that say the most of all the phrases come first, equals by
    code. The list depends on the templates and on Babel's version alone: a new version moves a language only if it
    gains or loses words.

    Raises DataError where fewer qualify; the message says how many.
    """
    names = tuple(templates) or tuple(TEMPLATES)
    qualified = _qualified(names)
    if count > len(qualified):
        raise DataError(
            f"num_languages is {count}, and {len(qualified)} of CLDR's languages have words of their own for every one "
            f"of the templates {', '.join(names)}; ask for at most {len(qualified)}, or for fewer templates"
        )
    return list(qualified[:count])


@cache
def _qualified(names: tuple[str, ...]) -> tuple[str, ...]:
    """All languages that qualify, in order. Takes a few seconds: some 300 locales are read."""
    probes = [
        [TEMPLATES[name](stable_random("probe", name, number), PROBE_MAX_NUMBER) for number in range(PROBES)]
        for name in names
    ]
    placeholders = [[phrase(ROOT) for phrase in phrases] for phrases in probes]
    said: dict[str, int] = {}
    seen: set[tuple[str | None, ...]] = set()
    for code in sorted(localedata.locale_identifiers()):
        if "_" in code or code == "en":
            continue
        texts = _say(probes, placeholders, IsolatedLocale(Locale(code)))
        if texts is not None and texts not in seen:
            seen.add(texts)
            said[code] = sum(text is not None for text in texts)
    return tuple(sorted(said, key=lambda code: (-said[code], code)))


def _say(
    probes: list[list[Phrase]], placeholders: list[list[str | None]], locale: Locale
) -> tuple[str | None, ...] | None:
    """Every probe in `locale`; None as soon as it has no words for a whole template."""
    texts: list[str | None] = []
    for phrases, root_says in zip(probes, placeholders, strict=True):
        said = [own_words(phrase(locale), placeholder) for phrase, placeholder in zip(phrases, root_says, strict=True)]
        if not any(said):
            return None
        texts += said
    return tuple(texts)
