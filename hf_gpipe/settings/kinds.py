"""The kinds of data, by which keys are allowed: `data.kind` of a recipe names one."""

from __future__ import annotations

from hf_gpipe.registry import KINDS as _KINDS


def _having(trait: str) -> tuple[str, ...]:
    return tuple(name for name, kind in _KINDS.items() if trait in kind.traits)


KINDS = tuple(_KINDS)
"""All kinds but those that name a task of one's own (`hf_gpipe.registry`)."""

# The kinds of data that use a key, in its annotation; with another kind the key is an error.
PAIRS, ROW_KINDS, FIELDS = _having("pairs"), _having("read"), _having("fields")

#: Kinds whose rows are messages, or text in their place.
MESSAGE_KINDS = _having("messages")

#: Kinds whose examples are pairs of rows.
PAIRED_KINDS = _having("two rows")

#: Kinds whose rows are one sequence, which decoder-only models learn.
SEQUENCE_KINDS = _having("sequence")

#: Kinds whose rows are cut to `max_length` tokens.
ROW_LENGTH_KINDS = tuple(kind for kind in SEQUENCE_KINDS if kind != "text")

CLDR, CHAT, IMAGES, IMAGE_TEXT = ("cldr",), ("chat",), ("images",), ("image_text",)
LABELLED = _having("labels")
OF_TEXT = (*PAIRS, *SEQUENCE_KINDS)
TOKENIZED = tuple(kind for kind in OF_TEXT if kind not in IMAGE_TEXT)
BY_TARGETS = (*PAIRS, "text")
READ = (*ROW_KINDS, *SEQUENCE_KINDS, *IMAGES)

#: Kinds whose loss is of each row alone; and those of them whose rows have a label for each token.
OF_ROWS_ALONE = tuple(kind for kind in KINDS if kind not in _having("several rows"))
PACKED = tuple(kind for kind in OF_ROWS_ALONE if kind not in (*LABELLED, *IMAGE_TEXT))
WITHOUT_IMAGES = (*TOKENIZED, *IMAGES)
OF_THE_HUB = ("hub", *SEQUENCE_KINDS, *IMAGES)


def uses(kind: object, kinds: tuple[str, ...] | None) -> bool:
    """Whether a kind of data uses a key of some kinds, or of all; a task of one's own has the keys of messages."""
    return kinds is None or kind in kinds or (kind not in KINDS and {*MESSAGE_KINDS} <= {*kinds})


def files_like(kind: str) -> str:
    """The kind of data whose files a kind has."""
    return kind if kind in KINDS else MESSAGE_KINDS[0]
