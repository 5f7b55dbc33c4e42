"""From a row to pairs: which fields, which direction, which tag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from hf_gpipe.data.fields import text_in
from hf_gpipe.data.formats import SOURCE, TARGET
from hf_gpipe.data.parts import PLACEHOLDER
from hf_gpipe.errors import DataError
from hf_gpipe.recipe import DataSection
from hf_gpipe.tasks.translation.pairs import ENGLISH, Pair, tagged

#: The `language` of pairs whose data name no languages.
ONE_LANGUAGE = "all"
SIDES = ("source", "target")
#: Kinds whose rows have no field for the language: one language may be named for all rows.
UNNAMED = ("parallel", "hub")


class PairFields:
    """How a row is turned into pairs, as the section `data` of a recipe says.

    Args:
        data: the section. Two line-aligned files have only the fields "source" and "target".

    Attributes:
        source_field: the field that holds the source; "translation.de" is the field "de" inside "translation", and
            "{language}" stands for the language of the row.
        target_field: the field that holds the target, in the same form.
        language_field: the field that holds the code of the side that is not English; None: the reader of the rows
            knows it.
        target_tag: whether sources start with the tag of their target's language; always if there are several.

    Raises:
        DataError: a direction is given and no side is known to be English.
    """

    def __init__(self, data: DataSection) -> None:
        is_parallel = data.kind == "parallel"
        self.source_field = SOURCE if is_parallel else data.source_field
        self.target_field = TARGET if is_parallel else data.target_field
        self.language_field = None if is_parallel else data.language_field
        self.target_tag = data.target_tag
        self._direction, self._english, self._split_by = data.direction, data.english, data.split_by
        # Parallel text has an empty line where a sentence has no translation.
        self._skip_empty = data.kind in UNNAMED if data.skip_empty is None else data.skip_empty
        if self._direction is not None and self.english_side is None:
            raise DataError(
                f"direction is {self._direction!r} and no field tells which side is English; set english to source "
                f"or target, or write {PLACEHOLDER} into the other side's field"
            )

    @cached_property
    def english_side(self) -> str | None:
        """The side that is English; None if it is not known, by `english` or by one "{language}" in the fields."""
        if self._english is not None:
            return self._english
        has = [PLACEHOLDER in field for field in (self.source_field, self.target_field)]
        return None if has[0] == has[1] else SIDES[has.index(False)]

    @property
    def name_languages(self) -> bool:
        """Whether the fields differ from language to language."""
        return PLACEHOLDER in self.source_field or PLACEHOLDER in self.target_field

    def targets(self, languages: Sequence[str]) -> list[str]:
        """The codes of the target languages of pairs of `languages`, as far as they are known."""
        if self._direction == "both":
            return [ENGLISH, *languages]
        if self._direction is None:
            return [ENGLISH] if self.english_side == "target" else list(languages)
        return [ENGLISH] if self._direction == "to_english" else list(languages)

    def has_tags(self, languages: Sequence[str]) -> bool:
        """Whether sources have a tag; empty `languages`: there may be several, which are known after reading."""
        targets = self.targets(languages)
        # If no side is known to be English, the target may be: only the user can tell.
        several = self.english_side is not None and (len(targets) > 1 or not targets)
        return self.target_tag or several

    def pairs(self, where: str, row: Mapping[str, Any], language: str | None, *, tags: bool) -> list[Pair]:
        """The pairs of a row: one, two if the direction is "both", none if a side is empty and that is allowed.

        Args:
            where: the row's name in messages.
            row: its values by name.
            language: the row's language, if its reader knows it.
            tags: whether sources have a tag.

        Raises:
            DataError: a field that is missing or does not hold text; names the row and the field.
        """
        if self.language_field is not None:
            language = text_in(row, self.language_field, where)
        known = ONE_LANGUAGE if language is None else language
        sides = []
        for field in (self.source_field, self.target_field):
            text = text_in(row, field.replace(PLACEHOLDER, known), where, may_be_empty=self._skip_empty)
            if text is None:
                return []
            sides.append(text)
        source, target = sides
        key = source if self._split_by == "source" else target
        made = []
        for side in self._target_sides:
            from_, to = (source, target) if side == "target" else (target, source)
            code = ENGLISH if side == self.english_side else known
            made.append(Pair(tagged(from_, code) if tags else from_, to, known, key, *self._languages(side, language)))
        return made

    def _languages(self, target_side: str, language: str | None) -> tuple[str, str]:
        """The languages of source and target of a pair, as far as they are known."""
        other = language or ""
        if self.english_side is None:
            return "", other
        return (other, ENGLISH) if target_side == self.english_side else (ENGLISH, other)

    @cached_property
    def _target_sides(self) -> list[str]:
        """The sides that are the target of a pair."""
        if self._direction in (None, "both"):
            return ["target"] if self._direction is None else ["target", "source"]
        return [side for side in SIDES if (side == self.english_side) == (self._direction == "to_english")]
