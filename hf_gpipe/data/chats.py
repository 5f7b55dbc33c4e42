"""Conversations: rows with messages, or with a prompt and its completion, in three splits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hf_gpipe.data.fields import PairFields, check_characters
from hf_gpipe.data.files import files_of
from hf_gpipe.data.formats import Row, read_json, read_jsonl, read_parquet
from hf_gpipe.data.pairs import MAX_TOKENIZER_EXAMPLES, SPLITS, split_of
from hf_gpipe.data.progress import progress
from hf_gpipe.data.text import drawn, is_local
from hf_gpipe.errors import DataError, listed, nearest
from hf_gpipe.recipe import DataSection

#: What templates know; "ipython" is llama 3's role of a tool's result, "function" an older one.
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "function")
#: ShareGPT's names of roles.
_SHAREGPT = {"human": "user", "gpt": "assistant"}
#: What is kept of a row.
_COLUMNS = ("messages", "prompt", "completion", "tools", "chat_template_kwargs")


class Conversation(NamedTuple):
    """A row that was read: its name in messages, and its values as JSON, which take less memory than objects."""

    where: str
    text: str

    @classmethod
    def of(cls, where: str, row: Mapping[str, Any]) -> Conversation:
        """A row of any form that `conversation_of` knows. Raises DataError."""
        return cls(where, json.dumps(conversation_of(where, row), ensure_ascii=False))

    @property
    def row(self) -> dict[str, Any]:
        """What `conversation_of` returned."""
        found: dict[str, Any] = json.loads(self.text)
        return found


@dataclass(frozen=True)
class ChatCorpus:
    """Conversations in three splits."""

    train: list[Conversation]
    validation: list[Conversation]
    test: list[Conversation]
    languages: list[str] = field(default_factory=list)
    target_tags: list[str] = field(default_factory=list)

    def texts(self, max_conversations: int | None = None) -> Iterator[str]:
        """The texts of training conversations, to train a tokenizer on.

        Args:
            max_conversations: how many are sampled where there are more; None: `MAX_TOKENIZER_EXAMPLES`.
        """
        most = max_conversations or MAX_TOKENIZER_EXAMPLES
        for conversation in drawn(self.train, most, "texts", most):
            row = conversation.row
            for part in (row["messages"],) if "messages" in row else (row["prompt"], row["completion"]):
                yield from [part] if isinstance(part, str) else filter(None, map(text_of_message, part))


def chat_corpus(data: DataSection) -> ChatCorpus:
    """The conversations of local files, or of a data set of the Hub.

    `data.path` is a file, wildcards, or a directory with files whose names end in .jsonl, .json or .parquet, the first
    two perhaps in .gz; otherwise the Hub id of a data set, or a directory in its form, whose own splits "validation"
    and "test" are kept. A split that is not there is cut off from the training rows by a hash of each.

    Raises:
        DataError: no such files or data set, a row that is not a conversation, or none to train on.
    """
    path = data.path or ""
    own: dict[str, list[Conversation]] = {}
    if is_local(path, "chat"):
        if data.subset is not None or data.revision is not None:
            key = "subset" if data.subset is not None else "revision"
            raise DataError(f"data.{key} is for data sets of the Hub, and {path} are local files; leave it out")
        rows: Iterable[Row] = (row for file in files_of(path, "chat") for row in _rows(file))
    else:
        from hf_gpipe.data.hub import hub_parts  # its library takes a second to import

        (part,) = hub_parts(data, PairFields.of(data))
        rows = part.train()
        held_out = {"validation": part.validation, "test": part.test}
        own = {name: _read(opened(), name) for name, opened in held_out.items() if opened}
    read = drawn(_read(rows, path), data.max_examples, "max_examples", data.seed)
    splits: dict[str, list[Conversation]] = {split: [] for split in SPLITS}
    fractions = [
        0.0 if name in own else share
        for name, share in (("validation", data.validation_fraction), ("test", data.test_fraction))
    ]
    for one in read:
        splits[split_of(one.text, *fractions)].append(one)
    if not splits["train"]:
        raise DataError(
            f"there are no conversations to train on ({len(splits['validation'])} for validation, "
            f"{len(splits['test'])} for test); give more, or smaller validation_fraction and test_fraction"
        )
    splits |= own
    return ChatCorpus(splits["train"], splits["validation"], splits["test"])


def _read(rows: Iterable[Row], name: str) -> list[Conversation]:
    return [Conversation.of(*row) for row in progress(rows, f"reading {name}", "conversations")]


def _rows(path: Path) -> Iterator[Row]:
    name = path.name.removesuffix(".gz")
    for suffix, read in ((".jsonl", read_jsonl), (".json", read_json), (".parquet", read_parquet)):
        if name.endswith(suffix):
            return read(path)
    raise DataError(f"data.path: {path} has no conversations; names that end in .jsonl, .json or .parquet are read")


def conversation_of(where: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as TRL and transformers know it: "messages", or "prompt" and "completion", with "tools" if there are any.

    Args:
        where: the row's name in messages.
        row: has `messages`, a list of {"role", "content"}; or ShareGPT's `conversations`, a list of {"from", "value"};
            or `prompt` and `completion`, both text or both lists of messages. `tools` may be JSON text.

    Raises:
        DataError: another form, an unknown role, content that is not text, or no assistant turn; names the row.
    """
    given = {name: value for name, value in row.items() if value is not None}
    if "conversations" in given:
        if "messages" in given:
            raise DataError(f"{where}: both 'messages' and 'conversations' are there; leave one of the columns out")
        given["messages"] = given.pop("conversations")
    if ("messages" in given) == ("prompt" in given and "completion" in given):
        both = "messages" in given
        raise DataError(
            f"{where}: {'both ' if both else 'neither '}'messages' {'and' if both else 'nor'} 'prompt' with "
            f"'completion' {'are' if both else 'is'} there; a conversation is in 'messages' (or ShareGPT's "
            f"'conversations'), or in 'prompt' and 'completion'; the columns found are {listed(list(map(str, row)))}"
        )
    if "messages" in given:
        given = {name: value for name, value in given.items() if name not in ("prompt", "completion")}
        given["messages"] = answered = _messages(where, "messages", given["messages"])
    else:
        prompt, answered = given["prompt"], given["completion"]
        if isinstance(prompt, str) != isinstance(answered, str):
            raise DataError(f"{where}: one of 'prompt' and 'completion' is text and the other is not; use one form")
        if isinstance(prompt, str):
            for name in ("prompt", "completion"):
                check_characters(given[name], name, where)
            if not answered.strip():
                raise DataError(f"{where}: 'completion' is empty, so nothing is learnt; leave the row out")
            return {"prompt": prompt, "completion": answered}
        given["prompt"] = _messages(where, "prompt", prompt)
        given["completion"] = answered = _messages(where, "completion", answered)
    if not any(message["role"] == "assistant" for message in answered):
        name = "messages" if "messages" in given else "completion"
        roles = ", ".join(dict.fromkeys(message["role"] for message in answered))
        raise DataError(
            f"{where}: {name} has no assistant turn (only {roles}), so nothing is learnt; leave the row out"
        )
    if isinstance(tools := given.get("tools"), str):
        try:
            given["tools"] = json.loads(tools)
        except ValueError as error:
            raise DataError(
                f"{where}: tools is text that is not JSON ({error}); give a list of JSON schemas"
            ) from error
    return {name: given[name] for name in _COLUMNS if name in given}


def text_of_message(message: Mapping[str, Any]) -> str:
    """The text of a message's content, or an empty string."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _messages(where: str, column: str, value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {column} is {_short(value)}; it must be a list of messages that is not empty")
    return [_message(f"{where}: {column}[{number}]", message) for number, message in enumerate(value)]


def _message(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f'{where} is {_short(value)}; a message is {{"role": ..., "content": ...}}')
    # Arrow gives all messages of a column the same keys.
    message = {key: one for key, one in value.items() if one is not None}
    role_key = "role" if "role" in message else "from"
    role = message.pop(role_key, None)
    if role_key == "from":
        role = _SHAREGPT.get(role, role) if isinstance(role, str) else role
        if "value" in message:
            message["content"] = message.pop("value")
    if role not in ROLES:
        hint = nearest(role, (*ROLES, *_SHAREGPT)) if isinstance(role, str) else ""
        raise DataError(
            f"{where}.{role_key} is {_short(role)}; the roles are {', '.join(ROLES)}, and in ShareGPT's form human and "
            f"gpt{hint}"
        )
    content = message.get("content")
    if content is None and not (role == "assistant" and message.keys() & {"tool_calls", "reasoning_content"}):
        raise DataError(f"{where} has no content; give it text, or an assistant's message tool_calls")
    parts = content if isinstance(content, list) else [] if content is None else [{"type": "text", "text": content}]
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part["text"], str):
            raise DataError(
                f'{where}.content is {_short(content)}; it must be text, or a list of {{"type": "text", "text": ...}}'
            )
        check_characters(part["text"], "content", where)
    return {"role": role, **message}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
