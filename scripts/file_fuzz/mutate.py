"""Ways to damage a file: bytes of any file, and values of JSON, safetensors, YAML and tables."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from typing import Any

import yaml

#: What readers have stumbled over, as bytes that are put somewhere.
_MORSELS = (
    *(b"", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r", b"\n", b"\n\n", b"\t", b" ", b'"', b"'"),
    *(b"{", b"}", b"[", b"]", b"[" * 3000, b'{"a":' * 3000, b",", b":", b"NaN", b"Infinity", b"-1", b"0", b"1e999"),
    *(b"9" * 30, b"9" * 5000, b"2000000000", b"99999999999999999999", b"null", b"true", b"../../x", b"/etc/passwd"),
    *(b"&a ", b"*a", b"!!python/object/apply:os.system [x]", b"%YAML 9.9\n", b"\\ud800", b"\x80\x04cos\nsystem\n"),
)


def values(choose: random.Random, name: str) -> Any:
    """A value that does not belong where it will stand."""
    deep: Any = name
    for _ in range(choose.choice((1, 70, 400))):
        deep = [deep] if choose.random() < 0.5 else {"a": deep}
    return choose.choice(
        (
            *(None, True, False, 0, -1, 1.5, 10**7, 2_000_000_000, 2**63, 10**30, 10**400, float("nan"), float("inf")),
            *("", "x", "0", "../../x", "/etc/passwd", "a\0b", "\ud800", "x" * 100_000, "owner/name", "owner/name@v1:f"),
            *([], {}, [[]], [0] * 1000, {"": ""}, {"a": {"b": []}}, [None], ["x"], deep),
        )
    )


def in_value(value: Any, choose: random.Random) -> Any:
    """A JSON value with one or a few of its parts replaced, left out, doubled or renamed."""
    for _ in range(choose.choice((1, 1, 1, 3))):
        places = list(_places(value))
        if not places:
            return values(choose, "x")
        holder, key = choose.choice(places)
        action = choose.random()
        if action < 0.7:
            holder[key] = values(choose, str(key))
        elif action < 0.85:
            del holder[key]
        elif isinstance(holder, dict):
            holder[choose.choice(("", "x", "../x", "__class__", str(key) * 2))] = holder.pop(key)
        else:
            holder.extend(holder * choose.choice((1, 50)))
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    places = []
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        places.append((value, key))
        places += _places(value[key])
    return places


def in_bytes(content: bytes, choose: random.Random) -> bytes:
    """Bytes cut, flipped, doubled, moved, or with something put among them."""
    for _ in range(choose.choice((1, 1, 2, 5))):
        start = choose.randrange(len(content) + 1)
        stop = min(len(content), start + choose.choice((0, 1, 4, 100, 10_000)))
        part = content[start:stop]
        new = choose.choice(
            (
                choose.choice(_MORSELS),
                choose.randbytes(choose.choice((1, 8, 300))),
                part * choose.choice((2, 100)) if len(part) < 1000 else b"",
                bytes(byte ^ 1 << choose.randrange(8) for byte in part[:1]) + part[1:],
            )
        )
        content = content[:start] + new + content[stop:]
        if choose.random() < 0.1:
            content = content[: choose.randrange(len(content) + 1)]
    return content


def of_json(content: bytes, choose: random.Random) -> bytes:
    if choose.random() < 0.3:
        return in_bytes(content, choose)
    return json.dumps(in_value(json.loads(content), choose)).encode()


def of_lines(content: bytes, choose: random.Random) -> bytes:
    """JSON Lines: one of them is changed."""
    if choose.random() < 0.3:
        return in_bytes(content, choose)
    lines = content.splitlines()
    place = choose.randrange(len(lines))
    lines[place] = json.dumps(in_value(json.loads(lines[place]), choose)).encode()
    return b"\n".join(lines)


def of_safetensors(content: bytes, choose: random.Random) -> bytes:
    """The header, mostly, or its length."""
    if choose.random() < 0.2:
        return in_bytes(content, choose)
    size = int.from_bytes(content[:8], "little")
    header = of_json(content[8 : 8 + size], choose)
    length = len(header)
    if choose.random() < 0.2:
        length = choose.choice((0, 1, 2**31, 2**63, 2**64 - 1, 100_000_001, length - 1, length + 1)) % 2**64
    return length.to_bytes(8, "little") + header + content[8 + size :]


def of_yaml(content: bytes, choose: random.Random) -> bytes:
    if choose.random() < 0.4:
        return in_bytes(content, choose)
    value = in_value(yaml.safe_load(content), choose)
    try:
        return yaml.safe_dump(value).encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, RecursionError):
        return json.dumps(value).encode()


def of_table(content: bytes, choose: random.Random) -> bytes:
    """Words of a table exchanged, or numbers made large."""
    if choose.random() < 0.3:
        return in_bytes(content, choose)
    words = content.replace(b"\n", b" \n ").split(b" ")
    for _ in range(choose.choice((1, 2, 6))):
        place = choose.randrange(len(words))
        words[place] = choose.choice(
            (b"", b"2000000000", b"999999999", b"0F999999999", b"9F0", b"0", b"0,1", b"\n", choose.choice(words) * 2)
        )
    return b" ".join(words)


def of_gzip(of_content: Callable[[bytes, random.Random], bytes]) -> Callable[[bytes, random.Random], bytes]:
    """The packed content is changed, or the packed bytes, or the content is a bomb."""

    def mutate(content: bytes, choose: random.Random) -> bytes:
        if choose.random() < 0.4:
            return in_bytes(content, choose)
        if choose.random() < 0.1:
            return gzip.compress(choose.choice((b"0", b"[],", b"a\n", b'{"a": 1}\n')) * 30_000_000, 1, mtime=0)
        return gzip.compress(of_content(gzip.decompress(content), choose), mtime=0)

    return mutate
