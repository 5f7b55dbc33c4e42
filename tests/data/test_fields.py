"""Rows to pairs: nested fields, languages, directions and tags."""

from __future__ import annotations

import pytest

from hf_gpipe.errors import DataError
from hf_gpipe.recipe import DataSection
from hf_gpipe.tasks.translation.fields import PairFields

ROW = {"translation": {"de": "Haus", "en": "house"}, "lang": "de", "a.b": "flat"}
OPUS = {"source_field": "translation.{language}", "target_field": "translation.en"}


def fields_of(**options) -> PairFields:
    return PairFields(DataSection(kind="jsonl", path="x", **{**OPUS, **options}))


def made(row=ROW, language="de", tags=False, **options) -> list[tuple[str, str, str, str]]:
    pairs = fields_of(**options).pairs("here", row, language, tags=tags)
    return [(pair.source, pair.target, pair.language, pair.split_key) for pair in pairs]


def test_nested_fields_and_the_language_in_them():
    assert made() == [("Haus", "house", "de", "Haus")]
    assert made(language=None, language_field="lang", split_by="target") == [("Haus", "house", "de", "house")]
    assert made(source_field="a.b") == [("flat", "house", "de", "flat")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [("<2en> Haus", "house")]),
        ({"direction": "to_english"}, [("<2en> Haus", "house")]),
        ({"direction": "from_english"}, [("<2de> house", "Haus")]),
        ({"direction": "both"}, [("<2en> Haus", "house"), ("<2de> house", "Haus")]),
        ({"source_field": "translation.en", "target_field": "translation.{language}"}, [("<2de> house", "Haus")]),
        (
            {"source_field": "translation.en", "target_field": "translation.{language}", "direction": "to_english"},
            [("<2en> Haus", "house")],
        ),
        ({"source_field": "translation.de"}, [("<2de> Haus", "house")]),
        ({"source_field": "translation.de", "english": "target"}, [("<2en> Haus", "house")]),
        (
            {"source_field": "translation.de", "english": "target", "direction": "from_english"},
            [("<2de> house", "Haus")],
        ),
    ],
)
def test_directions_and_the_tags_of_their_targets(options, expected):
    assert [pair[:2] for pair in made(tags=True, **options)] == expected
    assert [(source.split("> ")[1], target) for source, target in expected] == [pair[:2] for pair in made(**options)]


def test_both_directions_of_a_pair_share_a_split():
    assert {key for *_, key in made(direction="both", split_by="target")} == {"house"}


def test_tags_stand_where_there_are_several_targets():
    def has_tags(languages, **options):
        return fields_of(**options).has_tags(languages)

    assert not has_tags(["de", "fr"])
    assert has_tags(["de", "fr"], target_tag=True)
    assert has_tags(["de"], direction="both")
    assert has_tags(["de", "fr"], direction="from_english")
    assert not has_tags(["de"], direction="from_english")
    assert has_tags([], direction="from_english", language_field="lang")
    assert not has_tags(["de", "fr"], source_field="a", target_field="b")


def test_rows_without_text_are_left_out_where_they_may_be():
    for empty in ("", "  ", None):
        row = {"translation": {"de": "Haus", "en": empty}}
        assert made(row, skip_empty=True) == []
        with pytest.raises(DataError, match=r"here: field 'translation\.en' is .*; it must be text"):
            made(row)
    with pytest.raises(DataError, match="it must be text"):
        made({"translation": {"de": "Haus", "en": 3}}, skip_empty=True)


def test_a_missing_field_is_named_with_those_found():
    with pytest.raises(
        DataError, match=r"no field 'translation\.fr'; .*the fields found are translation\.de, translation\.en, lang"
    ):
        made(language="fr")
    with pytest.raises(DataError, match=r"no field 'x\.y'; the fields found are"):
        made(source_field="x.y")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": "both", "source_field": "a", "target_field": "b"}, "no field tells which side is English"),
        ({"direction": "both", "target_field": "translation.{language}"}, "no field tells which side is English"),
    ],
)
def test_what_cannot_be_followed_is_refused(options, message):
    with pytest.raises(DataError, match=message):
        fields_of(**options)
