"""The kinds of phrase the CLDR corpus is made of: dates, durations, measures, amounts of money, names.

A template is a function `(rng, max_number) -> phrase`: it draws what the phrase is about (a day, a number, a country)
and returns a function that says it in a given locale, or says None where CLDR has no words for it. One draw said in
two locales is a pair of translations. Add a template by writing one decorated function.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from functools import cache
from random import Random

from babel import Locale, dates, lists, numbers, units

from hf_gpipe.data.cldr.locales import ENGLISH, ROOT

Phrase = Callable[[Locale], str | None]
Template = Callable[[Random, int], Phrase]


TEMPLATES: dict[str, Template] = {}

YEARS = (1950, 2049)
# Currencies that English writes with a symbol of their own.
SYMBOL_CURRENCIES = ("EUR", "USD", "GBP", "JPY", "INR", "KRW", "ILS", "VND", "BRL", "CAD", "AUD", "MXN", "CNY")
NAMED_CURRENCIES = (*SYMBOL_CURRENCIES, "CHF", "SEK", "NOK", "DKK", "PLN", "CZK", "HUF", "TRY", "RUB", "UAH", "ZAR")


def template(function: Template) -> Template:
    """Registers a template under its function's name."""
    TEMPLATES[function.__name__] = function
    return function


# ---- dates


def _wide_names(locale: Locale, kind: str, context: str) -> Mapping[int, str]:
    """The unabbreviated "months", "days" or "quarters" of a locale, in context "format" or "stand-alone"."""
    names: Mapping[int, str] = getattr(locale, kind).get(context, {}).get("wide", {})
    return names


def _draw_date(rng: Random) -> datetime.date:
    first, last = (datetime.date(year, 1, 1).toordinal() for year in (YEARS[0], YEARS[1] + 1))
    return datetime.date.fromordinal(rng.randrange(first, last))


def _own_words(text: str, day: datetime.date) -> str | None:
    """`text`, unless it calls a month or weekday by root's names: "M03" for March, "Tue" for Tuesday."""
    root_weekday = _wide_names(ROOT, "days", "format")[day.weekday()]
    return None if re.search(rf"\b(M\d\d|{root_weekday})\b", text) else text


def _date(day: datetime.date, style: str) -> Phrase:
    return lambda locale: _own_words(dates.format_date(day, style, locale=locale), day)


def _skeleton(day: datetime.date, skeleton: str) -> Phrase:
    return lambda locale: _own_words(dates.format_skeleton(skeleton, day, locale=locale), day)


def _calendar_name(kind: str, key: int) -> Phrase:
    """The name of a month, weekday or quarter on its own, in the nominative where the locale has it: "März"."""

    def phrase(locale: Locale) -> str | None:
        for context in ("stand-alone", "format"):
            name = _wide_names(locale, kind, context).get(key)
            if name and name != _wide_names(ROOT, kind, "format")[key]:
                return name
        return None

    return phrase


@template
def month(rng: Random, max_number: int) -> Phrase:
    """March"""
    return _calendar_name("months", rng.randint(1, 12))


@template
def weekday(rng: Random, max_number: int) -> Phrase:
    """Tuesday"""
    return _calendar_name("days", rng.randrange(7))


@template
def quarter(rng: Random, max_number: int) -> Phrase:
    """2nd quarter"""
    return _calendar_name("quarters", rng.randint(1, 4))


@template
def month_day(rng: Random, max_number: int) -> Phrase:
    """March 5"""
    return _skeleton(_draw_date(rng), "MMMMd")


@template
def month_year(rng: Random, max_number: int) -> Phrase:
    """March 2024"""
    return _skeleton(_draw_date(rng), "yMMMM")


@template
def date_long(rng: Random, max_number: int) -> Phrase:
    """March 5, 2024"""
    return _date(_draw_date(rng), "long")


@template
def date_full(rng: Random, max_number: int) -> Phrase:
    """Tuesday, March 5, 2024"""
    return _date(_draw_date(rng), "full")


# ---- numbers with a unit


def draw_number(rng: Random, max_number: int) -> int:
    """A number in 1..max_number, where the small ones are common: at most 9, 99, ... or max_number, evenly."""
    bounds = [10**digits - 1 for digits in range(1, len(str(max_number)))]
    return rng.randint(1, rng.choice([*bounds, max_number]))


def _measure(number: int, unit: str) -> Phrase:
    """`number` of a CLDR unit such as "length-mile"; in the short form where the locale has no long one."""
    placeholder = units.format_unit(number, unit, "short", locale=ROOT)

    def phrase(locale: Locale) -> str | None:
        for length in ("long", "short"):
            text = units.format_unit(number, unit, length, locale=locale)
            if unit not in text and text != placeholder:
                return text
        return None

    return phrase


def _drawn_measure(rng: Random, max_number: int, kind: str, names: str) -> Phrase:
    return _measure(draw_number(rng, max_number), f"{kind}-{rng.choice(names.split())}")


@template
def duration(rng: Random, max_number: int) -> Phrase:
    """3 days"""
    return _drawn_measure(rng, max_number, "duration", "second minute hour day week month year")


@template
def length(rng: Random, max_number: int) -> Phrase:
    """3 kilometers"""
    return _drawn_measure(rng, max_number, "length", "millimeter centimeter meter kilometer inch foot mile")


@template
def mass(rng: Random, max_number: int) -> Phrase:
    """3 kilograms"""
    return _drawn_measure(rng, max_number, "mass", "milligram gram kilogram tonne ounce pound")


@template
def volume(rng: Random, max_number: int) -> Phrase:
    """3 liters"""
    return _drawn_measure(rng, max_number, "volume", "milliliter liter cubic-meter cup gallon")


@template
def area(rng: Random, max_number: int) -> Phrase:
    """3 square meters"""
    return _drawn_measure(rng, max_number, "area", "square-meter square-kilometer hectare square-mile acre")


@template
def speed(rng: Random, max_number: int) -> Phrase:
    """3 kilometers per hour"""
    return _drawn_measure(rng, max_number, "speed", "kilometer-per-hour meter-per-second mile-per-hour")


@template
def temperature(rng: Random, max_number: int) -> Phrase:
    """3 degrees Celsius"""
    return _drawn_measure(rng, max_number, "temperature", "celsius fahrenheit")


@template
def data_size(rng: Random, max_number: int) -> Phrase:
    """3 megabytes"""
    return _drawn_measure(rng, max_number, "digital", "byte kilobyte megabyte gigabyte terabyte")


@template
def hours_and_minutes(rng: Random, max_number: int) -> Phrase:
    """3 hours and 20 minutes"""
    parts = (_measure(rng.randint(1, 23), "duration-hour"), _measure(rng.randint(1, 59), "duration-minute"))
    return lambda locale: _listed(locale, [part(locale) for part in parts])


@template
def relative_time(rng: Random, max_number: int) -> Phrase:
    """in 3 days; 3 days ago"""
    # A time difference of Python's ends at about 2.7 million years.
    number, past = draw_number(rng, min(max_number, 99_999)), rng.random() < 0.5
    unit = rng.choice(["second", "minute", "hour", "day", "week", "month", "year"])
    seconds = number * dict(dates.TIMEDELTA_UNITS)[unit]
    delta = datetime.timedelta(seconds=-seconds if past else seconds)

    def phrase(locale: Locale) -> str | None:
        text = dates.format_timedelta(
            delta, granularity=unit, threshold=float("inf"), add_direction=True, locale=locale
        )
        # Root says "-3 d", and some locales that have words of their own still keep that minus sign.
        return None if f"-{number}" in text else text

    return phrase


# ---- money


@template
def price(rng: Random, max_number: int) -> Phrase:
    """€12.50"""
    amount, currency = draw_number(rng, max_number) + rng.randrange(100) / 100, rng.choice(SYMBOL_CURRENCIES)
    return lambda locale: numbers.format_currency(amount, currency, locale=locale)


@template
def amount_of_money(rng: Random, max_number: int) -> Phrase:
    """3 US dollars"""
    number, currency = draw_number(rng, max_number), rng.choice(NAMED_CURRENCIES)

    def phrase(locale: Locale) -> str | None:
        text = numbers.format_currency(
            number, currency, "#,##0", locale=locale, currency_digits=False, format_type="name"
        )
        return None if currency in text else text

    return phrase


# ---- names


@cache
def _codes(kind: str) -> list[str]:
    """The codes English has names for, sorted: "FR" of the territories, "fr" of the languages."""
    # Territories with digits are regions of the world, languages with an underscore are regional variants.
    return sorted(
        code for code in getattr(ENGLISH, kind) if code.isalpha() and (kind != "territories" or len(code) == 2)
    )


def _name(kind: str, code: str) -> Phrase:
    def phrase(locale: Locale) -> str | None:
        names: Mapping[str, str] = getattr(locale, kind)
        name = names.get(code)
        return None if name == code else name

    return phrase


def _listed(locale: Locale, items: list[str | None]) -> str | None:
    """The items joined by the locale's "and"; None where an item is missing or the locale has no "and" of its own."""
    present = [item for item in items if item]
    patterns = locale.list_patterns["standard"]
    if len(present) < len(items) or (patterns["2"] == ROOT.list_patterns["standard"]["2"]):
        return None
    return lists.format_list(present, "standard", locale)


def _name_list(rng: Random, kind: str) -> Phrase:
    names = [_name(kind, code) for code in rng.sample(_codes(kind), rng.randint(2, 3))]
    return lambda locale: _listed(locale, [name(locale) for name in names])


@template
def territory(rng: Random, max_number: int) -> Phrase:
    """France"""
    return _name("territories", rng.choice(_codes("territories")))


@template
def language(rng: Random, max_number: int) -> Phrase:
    """French"""
    return _name("languages", rng.choice(_codes("languages")))


@template
def script(rng: Random, max_number: int) -> Phrase:
    """Cyrillic"""
    return _name("scripts", rng.choice(_codes("scripts")))


@template
def currency(rng: Random, max_number: int) -> Phrase:
    """Swiss Franc"""
    return _name("currencies", rng.choice(_codes("currencies")))


@template
def territory_list(rng: Random, max_number: int) -> Phrase:
    """France, Japan, and Peru"""
    return _name_list(rng, "territories")


@template
def language_list(rng: Random, max_number: int) -> Phrase:
    """French and Japanese"""
    return _name_list(rng, "languages")
