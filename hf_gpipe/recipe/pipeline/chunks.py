"""How `pipeline` cuts the rows of a mini-batch into chunks of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, NamedTuple, Self, cast

from hf_gpipe.errors import UserError
from hf_gpipe.recipe.data import WITHOUT_IMAGES
from hf_gpipe.recipe.pipeline.mesh import MeshKeys
from hf_gpipe.recipe.pipeline.stages import ASYNCHRONOUS, AUTO, DEALT_STAGES, HEAD_IN_PARTS, TEACHER
from hf_gpipe.recipe.section import Count, NotNegative, NotWith, OneOf, refuse_given, section
from hf_gpipe.schedule import is_table_file

CHUNK_UNIT = " tokens"


class Chunks(NamedTuple):
    """How rows are cut: into at most so many chunks of tokens, and how much shorter later ones are."""

    most: int = 1
    taper: float = 0.0

    def within(self, tokens: int) -> Chunks:
        """The chunks of rows of so many tokens: a chunk has at least one token."""
        return self._replace(most=min(self.most, tokens))


@section(kw_only=False)
class ChunkKeys(MeshKeys):
    """How rows are cut into chunks."""

    sequence_chunks: Annotated[
        Count | Annotated[str, OneOf((AUTO,), CHUNK_UNIT)],
        WITHOUT_IMAGES,
        NotWith((ASYNCHRONOUS, HEAD_IN_PARTS, DEALT_STAGES, TEACHER)),
    ] = 1
    """Number of chunks of tokens into which rows are cut in training; chunks go through the stages one after another,
    as micro-batches do. It helps where a mini-batch has few and long rows, and needs a decoder-only model whose layers
    keep only keys and values of earlier tokens. Evaluation and generation do not cut rows. 1: rows are whole; auto: the
    planner chooses; or the most tokens of a chunk of the longest rows, such as 4096 tokens."""

    chunk_taper: NotNegative | Annotated[str, OneOf((AUTO,))] = 0.0
    """How much shorter later chunks are. 0: all chunks have the same length, which takes the least memory. R: chunks
    take equal times if the last token of a row takes 1 + R times as long as the first token, because it attends to more
    tokens; the first chunk is then the longest, and decides the memory. auto: the planner compares 0 with the R of its
    own estimate."""

    def check(self) -> None:
        super().check()
        if isinstance(self.sequence_chunks, str):
            self.most_chunk_tokens  # noqa: B018  # raises UserError for another text
            if is_table_file(self.schedule):
                raise UserError(
                    f"sequence_chunks is {self.sequence_chunks!r} and schedule is {self.schedule}, a table of so many "
                    "chunks as it says; give that number as sequence_chunks."
                )
        if not self.cuts_rows:
            refuse_given(self, ("chunk_taper",), "sequence_chunks is 1, so rows are whole; give sequence_chunks")
        if self.is_taper_open and self.partition == "profile":
            raise UserError(
                "chunk_taper is auto and partition is profile, which measures chunks of one length; give a number, "
                "such as 0, or partition auto."
            )

    def is_open(self, name: str) -> bool:
        # By the length of a chunk it chooses their number.
        return super().is_open(name) or (name == "sequence_chunks" and self.most_chunk_tokens is not None)

    @property
    def cuts_rows(self) -> bool:
        """Whether rows are cut into chunks, or may be."""
        return self.sequence_chunks != 1

    @property
    def chunks(self) -> Chunks:
        """How rows are cut into chunks, where the planner need not choose that."""
        return Chunks(cast("int", self.sequence_chunks), cast("float", self.chunk_taper))

    @property
    def is_taper_open(self) -> bool:
        """Whether the planner chooses how much shorter later chunks are."""
        return self.chunk_taper == AUTO

    @property
    def most_chunk_tokens(self) -> int | None:
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

    def num_chunks(self, tokens: int) -> int | None:
        """Into how many chunks rows of so many tokens are cut; None: the planner chooses."""
        if isinstance(self.sequence_chunks, int):
            return self.sequence_chunks
        most = self.most_chunk_tokens
        return None if most is None else -(-tokens // most)

    def with_chunks(self, number: int) -> Chunks:
        """So many chunks, with the taper that is given; where it is open, that is 0."""
        return Chunks(number, self.chunk_taper if number > 1 and not isinstance(self.chunk_taper, str) else 0.0)

    def cut_into(self, chunks: Chunks, **values: Any) -> Self:
        """A copy whose rows are cut so, with other values."""
        return replace(self, sequence_chunks=chunks.most, chunk_taper=chunks.taper, **values)
