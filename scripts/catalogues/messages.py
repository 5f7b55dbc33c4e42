"""From a catalogue's messages to pairs of a sentence and its translation; what is left out has a reason."""

from __future__ import annotations

import gettext
import html
import io
import re
import struct
from typing import NamedTuple

#: Characters of an English message, and of a translation.
ENGLISH_LENGTHS, TRANSLATION_LENGTHS = (8, 200), (2, 260)
#: A translation is at most so many times as long as the message, and so many characters longer.
LONGEST_RATIO, LONGEST_EXCESS = 3, 20
#: Share of letters among the characters of a message that are not blanks.
FEWEST_LETTERS = 0.6

_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_BLANKS = re.compile(r"\s+")
#: The letter that opens a menu entry: (&F) or (_F) after the text, & or _ inside it.
_KEY_IN_BRACKETS = re.compile(r"\s*\([&_][^\s()]\)")
_AMPERSAND = re.compile(r"&(?=\w)")
_WITH_UNDERSCORE = re.compile(r"\w*_\w+|\w+_")
_PLACEHOLDER = re.compile(
    r"%[-+ #0-9.*']*[A-Za-z@<(%]"  # printf, GCC's diagnostics
    r"|%\d|%[LN]\d|\{[^{}]*\}|\$[\w({]|\\|[@#]\w|@\S+@|https?:|www\.|\S@\S|&\w+;"
)
#: One word with signs inside: a name of a file, an option, an identifier.
_NAME = re.compile(r"\S*[\w.][._/:]\S*\w|-\S+")
_NOT_A_SENTENCE = re.compile(r"translator[-_ ]credits|copyright|\(c\)|©|your names|your emails", re.IGNORECASE)
_NO_LETTER = re.compile(r"[^\w ]|[\d_]")
_WORD = re.compile(r"[A-Za-z]{3}")
#: Not those that only format, such as the zero-width space between Khmer words.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ufffd]")
_DIGITS = re.compile(r"\d+")


class Message(NamedTuple):
    """One entry of a catalogue.

    Attributes:
        english: its text in the program.
        translation: its text in the catalogue's language; empty: there is none.
        dropped: why it is no pair, before its texts are looked at; None: nothing is against it.
    """

    english: str
    translation: str
    dropped: str | None


class CatalogueError(Exception):
    """A file that cannot be read as a catalogue; the message says why."""


def read_catalogue(content: bytes) -> list[Message]:
    """The messages of a compiled catalogue (.mo) in order. Raises CatalogueError: it is none, or is damaged."""
    # Babel's reader refuses a whole catalogue if a date in its header is not in the usual form. The standard library's
    # has no public way to list the messages.
    try:
        catalogue = gettext.GNUTranslations(io.BytesIO(content))
    except (OSError, ValueError, LookupError, AttributeError, struct.error) as error:
        raise CatalogueError(f"{type(error).__name__}: {error}") from error
    entries: dict[str | tuple[str, int], str] = catalogue._catalog  # type: ignore[attr-defined]
    messages = []
    for key, translation in entries.items():
        if isinstance(key, tuple):
            # There is a key for each form.
            messages += [Message("", "", "plural forms")] * (key[1] == 0)
        elif key:  # without one it is the header
            # The context of a message is before the sign 4.
            messages.append(Message(key.rpartition("\4")[2], translation, None if translation else "not translated"))
    return messages


def pair_of(message: Message) -> tuple[str, str] | str:
    """The English sentence and its translation, cleaned; or why the message is no pair, in a few words."""
    if message.dropped is not None:
        return message.dropped
    if _NOT_A_SENTENCE.search(message.english):
        return "credits or copyright"
    plain = [html.unescape(_TAG.sub("", text)) for text in (message.english, message.translation)]
    if any("<" in text or ">" in text for text in plain):
        return "markup"
    without_keys = _without_keys(*plain)
    if without_keys is None:
        return "identifier"
    english, translation = (_BLANKS.sub(" ", text).strip() for text in without_keys)
    if _PLACEHOLDER.search(english) or _PLACEHOLDER.search(translation):
        return "placeholder"
    return _refused(english, translation) or (english, translation)


def _refused(english: str, translation: str) -> str | None:
    """Why two cleaned texts are no pair; None: they are one."""
    if _NAME.fullmatch(english):
        return "identifier"
    is_usual = ENGLISH_LENGTHS[0] <= len(english) <= ENGLISH_LENGTHS[1]
    is_usual &= TRANSLATION_LENGTHS[0] <= len(translation) <= TRANSLATION_LENGTHS[1]
    if not is_usual or len(translation) > LONGEST_RATIO * len(english) + LONGEST_EXCESS:
        return "length"
    if english.casefold() == translation.casefold():
        return "identical"
    num_others = len(_NO_LETTER.findall(english))
    num_signs = len(english) - english.count(" ")
    if not _WORD.search(english) or num_signs - num_others < FEWEST_LETTERS * num_signs:
        return "few letters"
    # Not all scripts write numbers in digits: only other numbers are an error of the translation.
    numbers = _numbers(translation)
    if numbers and numbers != _numbers(english):
        return "other numbers"
    if _CONTROL.search(english + translation):
        return "control characters"
    return None


def _numbers(text: str) -> list[int]:
    """The numbers in a text, in any script's digits, without their order."""
    return sorted(int(digits) for digits in _DIGITS.findall(text) if len(digits) < 20)


def _without_keys(english: str, translation: str) -> tuple[str, str] | None:
    """Both texts without the marks of menu keys; None: an underscore belongs to an identifier."""
    if "&" not in english + translation and "_" not in english + translation:
        return english, translation
    english, translation = (_KEY_IN_BRACKETS.sub("", text) for text in (english, translation))
    english, translation = (_AMPERSAND.sub("", text) for text in (english, translation))
    marked = _WITH_UNDERSCORE.findall(english)
    # A word that a translation has as well, underscore and all, is not a word but a name in a program.
    is_name = len(marked) > 1 or max(english.count("_"), translation.count("_")) > 1
    if is_name or any(word in translation for word in marked) or (not marked and "_" in english):
        return None
    return english.replace("_", ""), translation.replace("_", "")
