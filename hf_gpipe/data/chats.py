"""Conversations and preferences: rows with messages, or with a prompt and its completion or two answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_gpipe import strict_json
from hf_gpipe.data.fields import check_characters, without_nulls
from hf_gpipe.errors import DataError, listed, nearest
from hf_gpipe.text import shorten

#: What templates know; "ipython" is llama 3's role of a tool's result, "function" an older one.
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "function")
#: ShareGPT's names of roles.
_SHAREGPT = {"human": "user", "gpt": "assistant"}
#: What is kept of a row.
_COLUMNS = ("messages", "prompt", "completion", "tools", "chat_template_kwargs")


def conversation_of(where: str, row: Mapping[str, Any], *, needs_assistant: bool = True) -> dict[str, Any]:
    """A row as TRL and transformers know it: "messages", or "prompt" and "completion", with "tools" if there are any.

    Args:
        where: the row's name in messages.
        row: has `messages`, a list of {"role", "content"}; or ShareGPT's `conversations`, a list of {"from", "value"},
            before which `system` is the first message; or `prompt` and `completion`, both text or both lists of
            messages. `tools` may be JSON text. An assistant's message with the weight 0 is not learnt.
        needs_assistant: whether messages must have an assistant turn.

    Raises:
        DataError: another form, an unknown role, content that is not text, or no assistant turn; names the row.
    """
    given = given_in(where, row)
    if "conversations" in given:
        if "messages" in given:
            raise DataError(f"{where}: both 'messages' and 'conversations' are there; leave one of the columns out")
        given["messages"] = _with_system(where, given.pop("conversations"), given.get("system"))
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
        _read_columns(where, given, ("prompt", "completion"))
        if isinstance(answered := given["completion"], str):  # of an empty one its end is learnt
            return {name: given[name] for name in ("prompt", "completion")}
    if needs_assistant and not any(message["role"] == "assistant" for message in answered):
        name = "messages" if "messages" in given else "completion"
        roles = ", ".join(dict.fromkeys(message["role"] for message in answered))
        raise DataError(
            f"{where}: {name} has no assistant turn (only {roles}), so nothing is learnt; leave the row out"
        )
    return {name: given[name] for name in _COLUMNS if name in given}


def preference_of(where: str, row: Mapping[str, Any], *, needs_prompt: bool = True) -> dict[str, Any]:
    """A row of preferences as TRL knows it: "prompt", "chosen" and "rejected", with "tools" if there are any.

    Args:
        where: the row's name in messages.
        row: has `chosen` and `rejected`, and perhaps `prompt`, all of them text or all lists of messages. Without a
            prompt, what both begin with is the prompt. `tools` may be JSON text.
        needs_prompt: whether the prompt may not be empty.

    Raises:
        DataError: another form, an unknown role, or content that is not text; names the row and the column.
    """
    given = given_in(where, row)
    if missing := [name for name in ("chosen", "rejected") if name not in given]:
        raise DataError(
            f"{where}: {missing[0]!r} is not there; a row of preferences has 'chosen' and 'rejected', and perhaps "
            f"'prompt'; the columns found are {listed(list(map(str, row)))}"
        )
    columns = [name for name in ("prompt", "chosen", "rejected") if name in given]
    _read_columns(where, given, columns)
    if "prompt" not in given:
        chosen, rejected = given["chosen"], given["rejected"]
        shared = num_common(chosen, rejected)
        if shared == min(len(chosen), len(rejected)):
            shared = max(shared - 1, 0)  # something is left of both
        elif shared and chosen[shared - 1] == " ":
            shared -= 1
        given |= {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}
    if needs_prompt and not given["prompt"]:
        raise DataError(f"{where}: there is no prompt, or it is empty; give 'prompt', or begin both answers with it")
    kept = ("prompt", "chosen", "rejected", "tools", "chat_template_kwargs")
    return {name: given[name] for name in kept if name in given}


def _read_columns(where: str, given: dict[str, Any], columns: Sequence[str]) -> None:
    """Read the messages of columns, which must all be text or all be messages."""
    is_text = {name: isinstance(given[name], str) for name in columns}
    if len(set(is_text.values())) > 1:
        forms = ", ".join(f"{name!r} is {'text' if is_text[name] else 'not'}" for name in columns)
        hint = " (leave 'prompt' out where both answers begin with it)" if len(columns) > 2 else ""
        raise DataError(f"{where}: {forms}; give all of them as text, or all as lists of messages{hint}")
    for name in columns:
        if is_text[name]:
            check_characters(given[name], name, where)
        else:
            given[name] = _messages(where, name, given[name])


def given_in(where: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a row that are not null, at any depth, and `tools` as a list. Raises DataError."""
    given: dict[str, Any] = without_nulls(row)
    if isinstance(tools := given.get("tools"), str):
        try:
            given["tools"] = strict_json.parse(tools, "it", error=DataError)
        except DataError as error:
            raise DataError(
                f"{where}: tools is text that is not JSON ({error}); give a list of JSON schemas"
            ) from error
    return given


def num_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The length of the beginning that both have."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((number for number, (own, other) in pairs if own != other), min(len(first), len(second)))


def text_of_message(message: Mapping[str, Any] | str) -> str:
    """The text of a message's content, or an empty string; text stands for itself."""
    if isinstance(message, str):
        return message
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _messages(where: str, column: str, value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {column} is {shorten(repr(value))}; it must be a list of messages that is not empty")
    return [_message(f"{where}: {column}[{number}]", message) for number, message in enumerate(value)]


def _with_system(where: str, messages: object, system: object) -> object:
    """ShareGPT's messages with the text of its system column, if any, before them."""
    if not system or not isinstance(messages, list):
        return messages
    if not isinstance(system, str):
        raise DataError(f"{where}: system is {shorten(repr(system))}; it must be text")
    first = messages[0] if messages and isinstance(messages[0], Mapping) else {}
    if "system" in (first.get("from"), first.get("role")):
        raise DataError(f"{where}: both 'system' and a first message of the system are there; leave one of them out")
    return [{"from": "system", "value": system}, *messages]


def _message(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f'{where} is {shorten(repr(value))}; a message is {{"role": ..., "content": ...}}')
    message = dict(value)
    if (weight := message.pop("weight", 1)) not in (0, 1):
        raise DataError(f"{where}.weight is {shorten(repr(weight))}; it must be 1, or 0 for what is not learnt")
    role_key = "role" if "role" in message else "from"
    role = message.pop(role_key, None)
    if role_key == "from":
        role = _SHAREGPT.get(role, role) if isinstance(role, str) else role
        if "value" in message:
            message["content"] = message.pop("value")
    if role not in ROLES:
        hint = nearest(role, (*ROLES, *_SHAREGPT)) if isinstance(role, str) else ""
        raise DataError(
            f"{where}.{role_key} is {shorten(repr(role))}; the roles are {', '.join(ROLES)}, and in ShareGPT's form "
            f"human and gpt{hint}"
        )
    content = message.get("content")
    if content is None and not (role == "assistant" and message.keys() & {"tool_calls", "reasoning_content"}):
        raise DataError(f"{where} has no content; give it text, or an assistant's message tool_calls")
    parts = content if isinstance(content, list) else [] if content is None else [{"type": "text", "text": content}]
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part["text"], str):
            raise DataError(
                f'{where}.content is {shorten(repr(content))}; it must be text, or a list of {{"type": "text", '
                '"text": ...}'
            )
        check_characters(part["text"], "content", where)
    return {"role": role, **message} | ({} if weight or role != "assistant" else {"weight": 0})
