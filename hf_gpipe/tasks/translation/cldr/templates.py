"""The kinds of phrase the CLDR corpus is made of: dates, durations, measures, amounts of money, names.

A template is a function `(rng, max_number) -> phrase`: it draws what the phrase is about (a day, a number, a country)
and returns a function that says it in a given locale, or says None where CLDR has no words for it. One draw said in
two locales is a pair of translations. Add a template as one more entry of `TEMPLATES`.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from functools import cache
from random import Random

from babel import Locale, dates, lists, numbers, units

from hf_gpipe.tasks.translation.cldr.locales import ENGLISH, ROOT

Phrase = Callable[[Locale], str | None]
Template = Callable[[Random, int], Phrase]


YEARS = (1950, 2049)
# Currencies that English writes with a symbol of their own.
SYMBOL_CURRENCIES = ("EUR", "USD", "GBP", "JPY", "INR", "KRW", "ILS", "VND", "BRL", "CAD", "AUD", "MXN", "CNY")
NAMED_CURRENCIES = (*SYMBOL_CURRENCIES, "CHF", "SEK", "NOK", "DKK", "PLN", "CZK", "HUF", "TRY", "RUB", "UAH", "ZAR")


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


def _drawn_measure(kind: str, names: str) -> Template:
    """A number of one of the units of a kind."""
    return lambda rng, max_number: _measure(draw_number(rng, max_number), f"{kind}-{rng.choice(names.split())}")


def _hours_and_minutes(rng: Random, max_number: int) -> Phrase:
    """3 hours and 20 minutes"""
    parts = (_measure(rng.randint(1, 23), "duration-hour"), _measure(rng.randint(1, 59), "duration-minute"))
    return lambda locale: _listed(locale, [part(locale) for part in parts])


def _relative_time(rng: Random, max_number: int) -> Phrase:
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


def _price(rng: Random, max_number: int) -> Phrase:
    """€12.50"""
    amount, currency = draw_number(rng, max_number) + rng.randrange(100) / 100, rng.choice(SYMBOL_CURRENCIES)
    return lambda locale: numbers.format_currency(amount, currency, locale=locale)


def _amount_of_money(rng: Random, max_number: int) -> Phrase:
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


def _drawn_name(kind: str) -> Template:
    return lambda rng, max_number: _name(kind, rng.choice(_codes(kind)))


def _name_list(rng: Random, kind: str) -> Phrase:
    names = [_name(kind, code) for code in rng.sample(_codes(kind), rng.randint(2, 3))]
    return lambda locale: _listed(locale, [name(locale) for name in names])


# ---- the templates, each with what English says

TEMPLATES: dict[str, Template] = {
    "month": lambda rng, _: _calendar_name("months", rng.randint(1, 12)),  # March
    "weekday": lambda rng, _: _calendar_name("days", rng.randrange(7)),  # Tuesday
    "quarter": lambda rng, _: _calendar_name("quarters", rng.randint(1, 4)),  # 2nd quarter
    "month_day": lambda rng, _: _skeleton(_draw_date(rng), "MMMMd"),  # March 5
    "month_year": lambda rng, _: _skeleton(_draw_date(rng), "yMMMM"),  # March 2024
    "date_long": lambda rng, _: _date(_draw_date(rng), "long"),  # March 5, 2024
    "date_full": lambda rng, _: _date(_draw_date(rng), "full"),  # Tuesday, March 5, 2024
    "duration": _drawn_measure("duration", "second minute hour day week month year"),  # 3 days
    "length": _drawn_measure("length", "millimeter centimeter meter kilometer inch foot mile"),  # 3 kilometers
    "mass": _drawn_measure("mass", "milligram gram kilogram tonne ounce pound"),  # 3 kilograms
    "volume": _drawn_measure("volume", "milliliter liter cubic-meter cup gallon"),  # 3 liters
    "area": _drawn_measure("area", "square-meter square-kilometer hectare square-mile acre"),  # 3 square meters
    "speed": _drawn_measure("speed", "kilometer-per-hour meter-per-second mile-per-hour"),  # 3 kilometers per hour
    "temperature": _drawn_measure("temperature", "celsius fahrenheit"),  # 3 degrees Celsius
    "data_size": _drawn_measure("digital", "byte kilobyte megabyte gigabyte terabyte"),  # 3 megabytes
    "hours_and_minutes": _hours_and_minutes,  # 3 hours and 20 minutes
    "relative_time": _relative_time,  # in 3 days; 3 days ago
    "price": _price,  # 12.50 euros, with the sign of the currency
    "amount_of_money": _amount_of_money,  # 3 US dollars
    "territory": _drawn_name("territories"),  # France
    "language": _drawn_name("languages"),  # French
    "script": _drawn_name("scripts"),  # Cyrillic
    "currency": _drawn_name("currencies"),  # Swiss Franc
    "territory_list": lambda rng, _: _name_list(rng, "territories"),  # France, Japan, and Peru
    "language_list": lambda rng, _: _name_list(rng, "languages"),  # French and Japanese
}
