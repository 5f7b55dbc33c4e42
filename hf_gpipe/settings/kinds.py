"""The kinds of data, by which keys are allowed: `data.kind` of a recipe names one."""

from __future__ import annotations

#: The kinds of data that use a key, in its annotation; with another kind the key is an error.
ROW_KINDS = ("jsonl", "csv", "parquet", "parallel", "hub")

#: Kinds whose rows are messages, or text in their place.
MESSAGE_KINDS = ("chat", "preferences", "kto", "rewards", "prompts")

#: Kinds whose examples are pairs of rows, and kinds that a model with a head for classes or a score learns.
PAIRED_KINDS = ("preferences", "rewards")
CLASSIFIER_KINDS = ("classification", "rewards", "images")

#: Kinds whose rows are cut to `max_length` tokens.
ROW_LENGTH_KINDS = (*MESSAGE_KINDS, "process_rewards", "classification", "embeddings", "image_text")

#: Kinds whose rows are one sequence, which decoder-only models learn.
SEQUENCE_KINDS = ("text", *ROW_LENGTH_KINDS)

CLDR = ("cldr",)
FIELDS = ("jsonl", "csv", "parquet", "hub")
CHAT = ("chat",)
STEPS = ("process_rewards",)
IMAGES = ("images",)
IMAGE_TEXT = ("image_text",)
LABELLED = ("classification", *IMAGES)
PAIRS = (*CLDR, *ROW_KINDS)
OF_TEXT = (*PAIRS, *SEQUENCE_KINDS)
TOKENIZED = tuple(kind for kind in OF_TEXT if kind not in IMAGE_TEXT)
BY_TARGETS = (*PAIRS, "text")
READ = (*ROW_KINDS, *SEQUENCE_KINDS, *IMAGES)

#: Kinds whose loss is of several rows together; the others, and those of them whose rows have a label for each token.
_OF_SEVERAL_ROWS = (*PAIRED_KINDS, "kto", "embeddings", "prompts")
OF_ROWS_ALONE = tuple(kind for kind in (*OF_TEXT, *IMAGES) if kind not in _OF_SEVERAL_ROWS)
PACKED = tuple(kind for kind in OF_ROWS_ALONE if kind not in (*LABELLED, *IMAGE_TEXT))
WITHOUT_IMAGES = (*TOKENIZED, *IMAGES)
OF_THE_HUB = ("hub", *SEQUENCE_KINDS, *IMAGES)
