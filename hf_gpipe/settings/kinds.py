"""The kinds of data, by which keys are allowed: `data.kind` of a recipe names one."""

from __future__ import annotations

#: The kinds of data that use a key, in its annotation; with another kind the key is an error.
ROW_KINDS = ("jsonl", "csv", "parquet", "parallel", "hub")

#: Kinds whose rows are messages, or text in their place.
MESSAGE_KINDS = ("chat", "preferences", "kto", "rewards", "prompts")

#: Kinds whose examples are pairs of rows.
PAIRED_KINDS = ("preferences", "rewards")

#: Kinds whose rows are cut to `max_length` tokens.
ROW_LENGTH_KINDS = (*MESSAGE_KINDS, "classification", "embeddings", "image_text")

#: Kinds whose rows are one sequence, which decoder-only models learn.
SEQUENCE_KINDS = ("text", *ROW_LENGTH_KINDS)

CLDR = ("cldr",)
FIELDS = ("jsonl", "csv", "parquet", "hub")
CHAT = ("chat",)
IMAGES = ("images",)
IMAGE_TEXT = ("image_text",)
LABELLED = ("classification", *IMAGES)
PAIRS = (*CLDR, *ROW_KINDS)
OF_TEXT = (*PAIRS, *SEQUENCE_KINDS)
TOKENIZED = tuple(kind for kind in OF_TEXT if kind not in IMAGE_TEXT)
BY_TARGETS = (*PAIRS, "text")
READ = (*ROW_KINDS, *SEQUENCE_KINDS, *IMAGES)
KINDS = (*PAIRS, *SEQUENCE_KINDS, *IMAGES)
"""All kinds but those that name a task of one's own (`hf_gpipe.registry`)."""


def uses(kind: object, kinds: tuple[str, ...] | None) -> bool:
    """Whether a kind of data uses a key of some kinds, or of all; a task of one's own has the keys of messages."""
    return kinds is None or kind in kinds or (kind not in KINDS and {*MESSAGE_KINDS} <= {*kinds})


def files_like(kind: str) -> str:
    """The kind of data whose files a kind has."""
    return kind if kind in KINDS else MESSAGE_KINDS[0]


#: Kinds whose loss is of several rows together; the others, and those of them whose rows have a label for each token.
_OF_SEVERAL_ROWS = (*PAIRED_KINDS, "kto", "embeddings", "prompts")
OF_ROWS_ALONE = tuple(kind for kind in (*OF_TEXT, *IMAGES) if kind not in _OF_SEVERAL_ROWS)
PACKED = tuple(kind for kind in OF_ROWS_ALONE if kind not in (*LABELLED, *IMAGE_TEXT))
WITHOUT_IMAGES = (*TOKENIZED, *IMAGES)
OF_THE_HUB = ("hub", *SEQUENCE_KINDS, *IMAGES)
