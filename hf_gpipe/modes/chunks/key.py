"""Rows that are cut into chunks of tokens, as a mode of a configuration."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from hf_gpipe.errors import UserError
from hf_gpipe.schedule import is_table_file
from hf_gpipe.schedule.groups import Groups
from hf_gpipe.settings.kinds import WITHOUT_IMAGES
from hf_gpipe.settings.mode import AUTO, Auto, Keys, Mode
from hf_gpipe.settings.section import Count, NotNegative, refuse_given

CHUNK_UNIT = " tokens"
#: The name of the option, for error messages.
SETTING = "sequence_chunks"


class RowChunks(Mode):
    """How rows are cut into chunks."""

    kinds = WITHOUT_IMAGES
    cuts_rows: ClassVar[bool] = True

    sequence_chunks: Count | Auto | Annotated[str, Field(pattern=rf"\{CHUNK_UNIT}$")] = 1
    """Number of chunks of tokens into which rows are cut in training; chunks go through the stages one after another,
    as micro-batches do. It helps where a mini-batch has few and long rows, and needs a decoder-only model whose layers
    keep only keys and values of earlier tokens. Evaluation and generation do not cut rows. 1: rows are whole; auto: the
    planner chooses; or the most tokens of a chunk of the longest rows, such as 4096 tokens."""

    chunk_taper: NotNegative | Auto = 0.0
    """How much shorter later chunks are. 0: all chunks have the same length, which takes the least memory. R: chunks
    take equal times if the last token of a row takes 1 + R times as long as the first token, because it attends to more
    tokens; the first chunk is then the longest, and decides the memory. auto: the planner compares 0 with the R of its
    own estimate."""

    def check(self, keys: Keys) -> None:
        if isinstance(self.sequence_chunks, str):
            self.most_tokens  # noqa: B018  # raises UserError for another text
            if is_table_file(keys["schedule"]):
                raise UserError(
                    f"sequence_chunks is {self.sequence_chunks!r} and schedule is {keys['schedule']}, a table of so "
                    "many chunks as it says; give that number as sequence_chunks."
                )
        if not self.is_on(keys):
            refuse_given(self, ("chunk_taper",), "sequence_chunks is 1, so rows are whole; give sequence_chunks")
        if self.chunk_taper == AUTO and keys["partition"] == "profile":
            raise UserError(
                "chunk_taper is auto and partition is profile, which measures chunks of one length; give a number, "
                "such as 0, or partition auto."
            )

    @property
    def groups(self) -> Groups:
        size, taper = self.sequence_chunks, self.chunk_taper
        return Groups(1 if isinstance(size, str) else size, 0.0 if isinstance(taper, str) else taper)

    @property
    def left_open(self) -> tuple[str, ...]:
        return (SETTING,) if self.most_tokens is not None else ()

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of a chunk, where they are given; None: the number of chunks is given, or open.

        Raises:
            UserError: the text is neither "auto" nor a number of tokens.
        """
        given = self.sequence_chunks
        if isinstance(given, int) or given == AUTO:
            return None
        number = given.removesuffix(CHUNK_UNIT)
        if not number.isdecimal() or not number.isascii() or not (tokens := int(number[:18])):
            raise UserError(
                f"sequence_chunks is {given!r}; write a number of chunks, auto, or the most tokens of a chunk, such as "
                "4096 tokens."
            )
        return tokens


class DecidedRowChunks(RowChunks):
    """How rows are cut, where that is known."""

    sequence_chunks: Count = 1
    chunk_taper: NotNegative = 0.0


FIELDS = {"chunks": (RowChunks, DecidedRowChunks)}
