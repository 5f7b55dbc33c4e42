"""The CLDR corpus: deterministic, without leaks, without CLDR's placeholders."""

from __future__ import annotations

import hashlib
import logging

import babel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_gpipe.data.sampling import epoch_rows
from hf_gpipe.data.splits import Corpus
from hf_gpipe.errors import DataError
from hf_gpipe.recipe import DataSection
from hf_gpipe.tasks.translation.cldr import cldr_corpus
from hf_gpipe.tasks.translation.cldr.corpus import power_law_count, ranks
from hf_gpipe.tasks.translation.cldr.coverage import cldr_languages
from hf_gpipe.tasks.translation.cldr.templates import TEMPLATES
from hf_gpipe.tasks.translation.pairs import Pair

SAMPLED, DRAWN = ["a"] * 9 + ["b"] * 3, [2, 8, 1, 3, 6, 8, 2, 11, 10, 9, 10, 11]
LANGUAGES = ["de", "fr", "ru", "zh"]
# Of recipes/quickstart.yaml and recipes/translation.
TEMPLATES_OF_RECIPES = [
    *("date_full", "date_long", "month_day", "month_year", "duration", "relative_time", "hours_and_minutes"),
    *("length", "mass", "speed", "amount_of_money"),
]


def corpus(**options) -> Corpus:
    return cldr_corpus(DataSection(kind="cldr", **{"languages": LANGUAGES, "examples_per_language": 150, **options}))


def every_pair(found: Corpus) -> list[Pair]:
    return [*found.train, *found.validation, *found.test]


def test_pairs_are_translations():
    found = {(pair.language, pair.source): pair.target for pair in every_pair(corpus(templates=["weekday", "month"]))}
    assert found["de", "Dienstag"] == "Tuesday"
    assert found["ru", "февраль"] == "February"
    assert found["zh", "星期二"] == "Tuesday"


def test_no_english_side_is_in_two_splits():
    found = corpus(validation_fraction=0.2, test_fraction=0.2, direction="both")
    english = [
        {pair.target if pair.source.startswith("<2en>") else pair.source.split("> ", 1)[1] for pair in part}
        for part in (found.train, found.validation, found.test)
    ]
    assert all(english)
    assert len(english[0] | english[1] | english[2]) == sum(map(len, english))


def test_no_source_occurs_twice():
    found = [(pair.language, pair.source) for pair in every_pair(corpus())]
    assert len(found) == len(set(found))


def test_same_arguments_same_corpus_and_another_seed_another():
    assert corpus() == corpus()
    assert corpus() != corpus(seed=1)


def test_other_languages_do_not_change_a_language():
    german = [pair for pair in every_pair(corpus()) if pair.language == "de"]
    alone = every_pair(corpus(languages=["de"]))
    assert german == alone


def test_the_draws_are_the_same_in_every_process():
    """Sets of strings change their order with PYTHONHASHSEED, which each process draws; what is made of them must not.

    Nor must corpora, whose digests are below.
    """
    assert epoch_rows(SAMPLED, 5.0, 7, 2) == DRAWN


def test_one_locale_does_not_disturb_another():
    """Babel's locales share data: Hebrew's months once appeared in the German corpus made after it."""
    german = every_pair(corpus(languages=["de"], templates=["month", "month_year", "quarter"], max_number=99))
    corpus(languages=["he", "lt"], examples_per_language=100)
    assert every_pair(corpus(languages=["de"], templates=["month", "month_year", "quarter"], max_number=99)) == german
    assert "März" in {pair.source for pair in german}


# Languages with much, little and hardly any data; three scripts written from right to left.
@pytest.mark.parametrize("language", ["haw", "kw", "yo", "mi", "eo", "ar", "he", "ckb", "ja", "pt_BR", "zh_Hant"])
def test_placeholders_of_the_root_locale_are_left_out(language):
    for pair in every_pair(corpus(languages=[language], examples_per_language=400)):
        assert "length-" not in pair.source, pair
        assert "M0" not in pair.source, pair
        assert not pair.source.startswith("-"), pair
        assert pair.source not in {"USD", "EUR", "FR", "fr"}, pair
        assert pair.source == " ".join(pair.source.split()), pair
        assert not set(pair.source) & set("\u200e\u200f\u061c"), pair


def test_english_to_languages_carries_tags():
    found = corpus(direction="from_english")
    assert found.target_tags == ["<2de>", "<2fr>", "<2ru>", "<2zh>"]
    assert all(pair.source.startswith(f"<2{pair.language}> ") for pair in every_pair(found))


def test_one_target_language_needs_no_tag():
    assert corpus().target_tags == []
    assert corpus(languages=["de"], direction="from_english").target_tags == []
    assert corpus(target_tag=True).target_tags == ["<2en>"]
    assert all(pair.source.startswith("<2en> ") for pair in every_pair(corpus(target_tag=True)))


def test_both_directions_hold_every_pair_twice():
    found = every_pair(corpus(direction="both"))
    to_english = {(pair.language, pair.source[6:], pair.target) for pair in found if pair.source.startswith("<2en> ")}
    from_english = {
        (pair.language, pair.target, pair.source.split("> ", 1)[1])
        for pair in found
        if not pair.source.startswith("<2en> ")
    }
    assert to_english == from_english
    assert len(found) == 2 * len(to_english)


def test_counts_follow_the_power_law():
    found = every_pair(corpus(examples_per_language=300, min_examples_per_language=100, power_law_exponent=1.0))
    assert [sum(pair.language == language for pair in found) for language in LANGUAGES] == [300, 150, 100, 100]
    assert power_law_count(1, 10**9, 10**4, 2.0) == 10**9
    assert power_law_count(10**3, 10**9, 10**4, 2.0) == 10**4


@pytest.mark.skipif(babel.__version__ != "2.18.0", reason="another version of CLDR has other words")
@pytest.mark.parametrize(
    ("options", "digest"),
    [
        ({}, "e530793054f2def1f33df45fc69cff0ebf5c1f5f8dc4cbf82059d356989d0e4a"),
        (
            {
                "languages": ["ar", "my", "pt_BR", "he", "yo"],
                "examples_per_language": 300,
                "direction": "both",
                "seed": 3,
                "power_law_exponent": 1.0,
                "max_number": 20000,
            },
            "66c78d6035d85c5ed8757725a3fc283a0dc20f1fd931247f84c8d50da10e6875",
        ),
    ],
)
def test_a_seed_gives_the_pairs_that_it_has_always_given(options, digest):
    """Numbers reported of a recipe can be compared with later ones only as long as its corpus stays as it is."""
    found = corpus(**options)
    lines = [
        "\t".join((split, pair.language, pair.source, pair.target, pair.split_key))
        for split in ("train", "validation", "test")
        for pair in getattr(found, split)
    ]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == digest


def test_102_languages_can_say_what_the_recipes_ask():
    languages = cldr_languages(102, TEMPLATES_OF_RECIPES)
    assert len(set(languages)) == 102
    assert all("_" not in language and language != "en" for language in languages)
    assert {"de", "ru", "zh", "ar", "hi", "sw", "ja", "th", "am", "ka"} <= set(languages)
    assert "ht" not in languages, "Babel's Haitian is French"
    assert "no" not in languages, "nb is Norwegian too"
    assert cldr_languages(5, TEMPLATES_OF_RECIPES) == languages[:5]
    assert languages[:90] == sorted(languages[:90]), "those that say everything are equals"
    found = corpus(
        languages=[],
        num_languages=102,
        templates=TEMPLATES_OF_RECIPES,
        rank_seed=0,
        examples_per_language=100,
        min_examples_per_language=5,
        power_law_exponent=1.0,
        validation_fraction=0,
        test_fraction=0,
    )
    assert found.languages == languages
    rank_of = ranks(languages, 0)
    sizes = dict.fromkeys(languages, 0)
    for pair in found.train:
        sizes[pair.language] += 1
    assert sizes == {language: max(5, round(100 / rank_of[language] + 1e-9)) for language in languages}


def test_ranks_decide_how_many_pairs_a_language_has_and_nothing_else():
    steep = {"examples_per_language": 200, "min_examples_per_language": 20, "power_law_exponent": 1.0}
    in_order, dealt = corpus(**steep), corpus(**steep, rank_seed=5)
    assert ranks(LANGUAGES, 5) != ranks(LANGUAGES, None)
    for language in LANGUAGES:
        mine, theirs = ([pair for pair in found.train if pair.language == language] for found in (in_order, dealt))
        shorter = min(len(mine), len(theirs))
        assert mine[:shorter] == theirs[:shorter]
    assert len({len(found.train) for found in (in_order, dealt, corpus(**steep, rank_seed=6))}) > 1


@given(st.lists(st.text("abcdefgh", min_size=2, max_size=3), unique=True, min_size=1), st.integers())
def test_dealt_ranks_are_all_there_and_stable(languages, seed):
    dealt = ranks(languages, seed)
    assert set(dealt) == set(languages)
    assert sorted(dealt.values()) == list(range(1, len(languages) + 1))
    assert ranks(languages[::-1], seed) == dealt, "the order of the languages has no say"
    fewer = ranks(languages[1:], seed)
    assert all(dealt[language] - rank in (0, 1) for language, rank in fewer.items())
    assert ranks(languages, None) == {language: n for n, language in enumerate(languages, start=1)}


def test_numbers_stay_within_max_number():
    found = every_pair(corpus(templates=["duration", "relative_time"], max_number=20, min_examples_per_language=10))
    numbers = {int(word) for pair in found for word in pair.target.split() if word.isdigit()}
    assert numbers == set(range(1, 21))


def test_a_shortage_is_logged_with_both_numbers(caplog):
    with caplog.at_level(logging.WARNING):
        found = corpus(languages=["de"], templates=["weekday"], validation_fraction=0, test_fraction=0)
    assert len(found.train) == 7
    assert "in 1 of 1 languages: de 7 of 150" in caplog.text


def test_many_shortages_are_one_short_line(caplog):
    languages = ["de", "fr", "ru", "zh", "es", "it"]
    with caplog.at_level(logging.WARNING):
        corpus(languages=languages, templates=["month"], validation_fraction=0, test_fraction=0)
    assert caplog.messages == [
        "CLDR has fewer different pairs than asked for in 6 of 6 languages: de 12 of 150, fr 12 of 150, "
        "ru 12 of 150, zh 12 of 150 and 2 more"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"languages": []}, "languages is empty; .* or set num_languages"),
        ({"num_languages": 3}, "languages names 4 languages and num_languages is 3; leave one of the two out"),
        (
            {"languages": [], "num_languages": 9999, "templates": TEMPLATES_OF_RECIPES},
            r"num_languages is 9999, and \d+ of CLDR's languages have words of their own .* month.*; ask for at most",
        ),
        ({"languages": ["pt_BX"]}, r"no locale 'pt_BX'; did you mean 'pt_BR'\?"),
        ({"languages": ["de", "en"]}, "'en' cannot be one of them"),
        ({"languages": ["de", "DE"]}, "'de' and 'DE' are the same"),
        (
            {"templates": ["durations"]},
            r"templates: 'durations' is unknown; did you mean 'duration'\?; choose from month",
        ),
        ({"examples_per_language": 50}, "min_examples_per_language is 100, more than examples_per_language, 50"),
        ({"languages": ["haw"], "templates": ["script"]}, "no words in 'haw' for the templates script"),
    ],
)
def test_what_cannot_be_generated_is_refused(options, message):
    with pytest.raises(DataError, match=message):
        corpus(**options)


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_says_something_in_several_languages(name):
    found = every_pair(
        corpus(
            templates=[name],
            examples_per_language=5,
            min_examples_per_language=1,
            test_fraction=0,
            validation_fraction=0,
        )
    )
    assert {pair.language for pair in found} == set(LANGUAGES)


def test_every_template_bears_large_numbers():
    assert every_pair(corpus(max_number=10**9))
