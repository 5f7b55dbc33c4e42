"""From a row of a file or a Hub data set to pairs: which fields, which direction, which tag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_gpipe.data.formats import SOURCE, TARGET
from hf_gpipe.data.pairs import ENGLISH, Pair, tagged
from hf_gpipe.errors import DataError, listed, nearest
from hf_gpipe.recipe import DataSection

#: What stands for the language in a field, a path or the name of a subset.
PLACEHOLDER = "{language}"
#: What `language` says of pairs whose data name no languages.
ONE_LANGUAGE = "all"
SIDES = ("source", "target")
#: Kinds whose rows have no field that could say the language: one language may be named for all of them.
UNNAMED = ("parallel", "hub")
_LONGEST_SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class PairFields:
    """How a row becomes pairs.

    Attributes:
        source_field: the field that holds the source; "translation.de" is the field "de" inside "translation", and
            "{language}" stands for the language of the row.
        target_field: the same of the target.
        language_field: the field that holds the code of the side that is not English; None: whoever reads the rows
            knows it.
        split_by: pairs that are equal on this side (of the fields, not of the direction) are never in two splits.
        direction: None: from source_field to target_field, as they stand; "to_english", "from_english" or "both":
            the sides are exchanged where that is needed.
        english: the side that is English, "source" or "target"; None: the one whose field has no "{language}" where
            the other's has.
        target_tag: whether sources start with the tag of their target's language, always so where there are several.
        skip_empty: whether a row without text on one side is left out; it is an error otherwise.

    Raises:
        DataError: a direction where no side is known to be English.
    """

    source_field: str
    target_field: str
    language_field: str | None
    split_by: str
    direction: str | None
    english: str | None
    target_tag: bool
    skip_empty: bool

    @classmethod
    def of(cls, data: DataSection) -> PairFields:
        """As a recipe says; two line-aligned files have the fields "source" and "target" and no others."""
        is_parallel = data.kind == "parallel"
        return cls(
            source_field=SOURCE if is_parallel else data.source_field,
            target_field=TARGET if is_parallel else data.target_field,
            language_field=None if is_parallel else data.language_field,
            split_by=data.split_by,
            direction=data.direction,
            english=data.english,
            target_tag=data.target_tag,
            # Makers of parallel text keep the place of a sentence that has no translation.
            skip_empty=data.kind in UNNAMED if data.skip_empty is None else data.skip_empty,
        )

    def __post_init__(self) -> None:
        if self.direction is not None and self.english_side is None:
            raise DataError(
                f"direction is {self.direction!r} and no field says which side is English; say so by english: source "
                f"or target, or write {PLACEHOLDER} into the other side's field"
            )

    @property
    def english_side(self) -> str | None:
        """The side that is English, where it is known."""
        if self.english is not None:
            return self.english
        has = [PLACEHOLDER in field for field in (self.source_field, self.target_field)]
        return None if has[0] == has[1] else SIDES[has.index(False)]

    @property
    def name_languages(self) -> bool:
        """Whether the fields differ from language to language."""
        return PLACEHOLDER in self.source_field or PLACEHOLDER in self.target_field

    def targets(self, languages: Sequence[str]) -> list[str]:
        """The codes of the languages that pairs of `languages` are translated to, as far as they are known."""
        if self.direction == "both":
            return [ENGLISH, *languages]
        if self.direction is None:
            return [ENGLISH] if self.english_side == "target" else list(languages)
        return [ENGLISH] if self.direction == "to_english" else list(languages)

    def has_tags(self, languages: Sequence[str]) -> bool:
        """Whether sources carry a tag; no `languages`: several, which only reading tells."""
        targets = self.targets(languages)
        # Where no side is known to be English the target may be it: only the user can tell.
        several = self.english_side is not None and (len(targets) > 1 or not targets)
        return self.target_tag or several

    def pairs(self, where: str, row: Mapping[str, Any], language: str | None, *, tags: bool) -> list[Pair]:
        """The pairs of a row: one, two where the direction is "both", none where a side is empty and may be.

        Args:
            where: what messages call the row.
            row: its values by name.
            language: the row's, where its reader knows it.
            tags: whether sources carry a tag.

        Raises:
            DataError: a field that the row lacks, or that holds no text; names the row and the field.
        """
        if self.language_field is not None:
            language = _text(row, self.language_field, where)
        known = ONE_LANGUAGE if language is None else language
        sides = []
        for field in (self.source_field, self.target_field):
            text = _text(row, field.replace(PLACEHOLDER, known), where, may_be_empty=self.skip_empty)
            if text is None:
                return []
            sides.append(text)
        source, target = sides
        key = source if self.split_by == "source" else target
        made = []
        for from_, to, target_side in ((source, target, "target"), (target, source, "source")):
            if self._goes_to(target_side):
                code = ENGLISH if target_side == self.english_side else known
                made.append(Pair(tagged(from_, code) if tags else from_, to, known, key))
        return made

    def _goes_to(self, side: str) -> bool:
        """Whether there is a pair whose target is this side."""
        if self.direction is None:
            return side == "target"
        is_english = side == self.english_side
        return self.direction == "both" or is_english == (self.direction == "to_english")


def _text(row: Mapping[str, Any], field: str, where: str, *, may_be_empty: bool = False) -> Any:
    """The text in a field; None where it is empty and may be."""
    value = _value(row, field, where)
    if may_be_empty and (value is None or (isinstance(value, str) and not value.strip())):
        return None
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: field {field!r} is {_short(value)}; it must be text that is not empty")
    check_characters(value, field, where)
    return value


def check_characters(text: str, field: str, where: str) -> None:
    """Raise DataError for what JSON can write and no file or tokenizer can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: field {field!r} has half of a surrogate pair, which is no character") from error


def _value(row: Mapping[str, Any], field: str, where: str) -> Any:
    if field in row:
        return row[field]
    found: Any = row
    for name in field.split("."):
        if not isinstance(found, Mapping) or name not in found:
            names = list(_names(row))
            raise DataError(
                f"{where}: no field {field!r}{nearest(field, names)}; the fields found are {listed(names) or 'none'}"
            )
        found = found[name]
    return found


def _names(row: Mapping[str, Any]) -> Iterator[str]:
    """The fields, and those one level inside them."""
    for name, value in row.items():
        if isinstance(value, Mapping) and value:
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield str(name)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
