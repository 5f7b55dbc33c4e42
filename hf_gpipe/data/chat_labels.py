"""The token ids of a conversation, and which of them are learnt.

Where the chat template marks the assistant's text with {% generation %}, transformers gives the mask. Other templates
are applied to the beginnings of the conversation: an assistant turn is the text between the messages before it, with
the generation prompt, and the messages up to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_gpipe.adapters.text_entries import token_ids
from hf_gpipe.data.chats import num_common, text_of_message
from hf_gpipe.errors import DataError, one_line

Messages = Sequence[Mapping[str, Any]]

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_REMEDY = "give a template with {% generation %} markers in data.chat_template"


class ChatEncoder:
    """Applies the tokenizer's chat template.

    Args:
        tokenizer: with a chat template, if rows are messages.
        assistant_only: whether only assistant turns are learnt.
        completion_only: of a prompt and its completion, whether only the completion is learnt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, assistant_only: bool, completion_only: bool) -> None:
        self._tokenizer, self._assistant_only, self._completion_only = tokenizer, assistant_only, completion_only

    def encode(self, where: str, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        """The ids of a row that `conversation_of` returned, or of {"text"}, and for each id whether it is learnt.

        Raises DataError for a conversation that the template refuses, or in which it does not show what the assistant
        says; names the row.
        """
        if "messages" in row:
            return self._chat(where, row, row["messages"])
        if "text" in row:
            ids = self._text(row["text"])
            return ids, [True] * len(ids)
        if isinstance(row["prompt"], str):
            ids = self._text(row["prompt"] + row["completion"])
            is_learnt = [True] * len(ids)
        else:
            ids, is_learnt = self._chat(where, row, [*row["prompt"], *row["completion"]])
        if self._completion_only:
            # Tokens may merge across the border, and templates may end the prompt in another way without a completion.
            prompt = ids_of(self._tokenizer, where, row, row["prompt"], add_generation_prompt=True)
            start = num_common(prompt, ids)
            is_learnt = [place >= start and is_own for place, is_own in enumerate(is_learnt)]
        return ids, is_learnt

    def _text(self, text: str) -> list[int]:
        """The ids of text without messages, which ends in the end-of-sequence token."""
        end, ids = self._tokenizer.eos_token, self._tokenizer.encode(text)
        has_end = end is None or ids[-1:] == [self._tokenizer.eos_token_id]
        return ids if has_end else self._tokenizer.encode(text + end)

    def _chat(self, where: str, row: Mapping[str, Any], messages: Messages) -> tuple[list[int], list[bool]]:
        weights = [message.get("weight", 1) for message in messages if message["role"] == "assistant"]
        if not self._assistant_only and all(weights):
            ids = ids_of(self._tokenizer, where, row, messages)
            return ids, [True] * len(ids)
        if not self._tokenizer.is_fast:
            raise DataError(
                f"the tokenizer {self._tokenizer.name_or_path!r} is a slow one, which does not know the tokens of the "
                "assistant's text; use a fast tokenizer, or data.assistant_only_loss: false and no weights"
            )
        ids, turns = self._turns(where, row, messages)
        are_all = all(weights)
        return ids, [not self._assistant_only if turn < 0 else are_all or bool(weights[turn]) for turn in turns]

    def _turns(self, where: str, row: Mapping[str, Any], messages: Messages) -> tuple[list[int], list[int]]:
        """The ids of a conversation, and for each id the number of its assistant turn, -1 outside of them."""
        if _MARKER.search(self._tokenizer.get_chat_template(None, row.get("tools"))):
            marked = apply_template(
                self._tokenizer, where, row, messages, return_dict=True, return_assistant_tokens_mask=True
            )
            mask = marked["assistant_masks"]
            begins, weights = np.diff(mask, prepend=0) == 1, [message.get("weight", 1) for message in messages]
            count = sum(message["role"] == "assistant" for message in messages)
            if not begins.any() or (not all(weights) and begins.sum() != count):
                raise DataError(
                    f"{where}: the chat template's {{% generation %}} markers are around {begins.sum() or 'none'} of "
                    f"its {count} assistant turns; correct the template, or remove the markers from it"
                )
            return token_ids(marked), np.where(mask, begins.cumsum() - 1, -1).tolist()
        text = self._render(where, row, messages)
        spans = self._assistant_spans(where, row, messages, text)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        turns = [
            next((turn for turn, (start, end) in enumerate(spans) if first < end and start < last), -1)
            for first, last in encoded["offset_mapping"]
        ]
        return token_ids(encoded), turns

    def _assistant_spans(
        self, where: str, row: Mapping[str, Any], messages: Messages, text: str
    ) -> list[tuple[int, int]]:
        """Where in `text`, the whole conversation, the assistant turns start and end."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            turn = f"{where}: the chat template has no {{% generation %}} markers, and messages[{number}]"
            if number == 0:
                raise DataError(f"{turn} is an assistant turn with nothing before it; leave it out, or {_REMEDY}")
            is_last = number + 1 == len(messages)
            until = text if is_last else self._render(where, row, messages[: number + 1])
            before = self._render(where, row, messages[:number], add_generation_prompt=True)
            start = len(before)
            if not text.startswith(before) or not until.startswith(before):
                # The generation prompt may go on, as with <think>, in a way that the whole conversation does not have.
                history = self._render(where, row, messages[:number])
                start = min(num_common(before, text), num_common(before, until))
                if not text.startswith(history) or start <= len(history):
                    raise DataError(f"{turn} begins in another way than as the end of a conversation; {_REMEDY}")
            end = len(text) if is_last else _end(text, start, until, message, self._tokenizer.eos_token)
            if end is None:
                raise DataError(f"{turn} ends in another way than as the end of a conversation; {_REMEDY}")
            spans.append((start, end))
        return spans

    def _render(self, where: str, row: Mapping[str, Any], messages: Messages, **options: Any) -> str:
        rendered: str = apply_template(self._tokenizer, where, row, messages, tokenize=False, **options)
        return rendered


def ends_of_turns(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, is_learnt: np.ndarray) -> Iterator[bool]:
    """For each learnt part of a conversation that is not cut at its end: whether a special token ends it."""
    special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    for end in np.flatnonzero(np.diff(is_learnt.astype(int), append=0) == -1):
        while end and is_learnt[end] and ids[end] not in special and not tokenizer.decode([ids[end]]).strip():
            end -= 1  # a line break may follow the token
        yield ids[end] in special


def apply_template(
    tokenizer: PreTrainedTokenizerBase, where: str, row: Mapping[str, Any], messages: Messages, **options: Any
) -> Any:
    """Apply the tokenizer's chat template to some messages of a row. Raises DataError where it refuses them."""
    options |= row.get("chat_template_kwargs", {})
    try:
        return tokenizer.apply_chat_template(list(messages), tools=row.get("tools"), **options)
    except Exception as error:  # templates raise errors of Jinja, and any of Python's
        raise DataError(
            f"{where}: the chat template refuses the conversation: {one_line(str(error))}; correct the row, or "
            "give another template in data.chat_template"
        ) from error


def ids_of(
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    row: Mapping[str, Any],
    content: str | Messages,
    *,
    add_generation_prompt: bool = False,
) -> list[int]:
    """The ids of a text, or of some messages of a row as the chat template writes them."""
    if isinstance(content, str):
        return tokenizer.encode(content)
    options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
    text = apply_template(tokenizer, where, row, content, **options)
    return tokenizer.encode(text, add_special_tokens=False)


def _end(text: str, start: int, until: str, message: Mapping[str, Any], eos: str | None) -> int | None:
    """Where a turn ends in `text` that starts there and at the end of `until`; None if it is not found.

    Templates may leave out the beginning of a turn that is not the last, such as its reasoning, and may put an
    end-of-sequence token after the last one. What is found has the last word of the message.
    """
    words = text_of_message(message).split()
    for ending in dict.fromkeys((until[start:], until[start:].removesuffix(eos or ""))):
        for cut in range(len(ending)):
            rest = len(ending) - cut
            if text.startswith(ending[cut : cut + 20], start) and text.startswith(ending[cut:], start):
                return start + rest if not words or words[-1] in ending[cut:] else None
    return None
