"""Completions from a server that speaks OpenAI's completions API, and telling it of new weights.

Nothing is sent but to the given host: no proxy, and no redirection is followed. Answers are read strictly.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired
from urllib.parse import urlsplit

from typing_extensions import TypedDict

from hf_gpipe import strict_json
from hf_gpipe.errors import UserError, check_number
from hf_gpipe.tasks.grpo.rollouts import Rollouts

#: Settings of sampling as if there were none, so that the server's own defaults do not change the distribution.
_NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}

_FOLDER, _MODEL = "{folder}", "{model}"
#: vLLM knows keys and values of a prompt by the adapters' name, and not by their weights.
_WITHOUT_CACHE: dict[str, dict[str, Any]] = {"/reset_prefix_cache": {}}
#: How servers are told to read the weights of a folder again: the bodies of POST requests, in order, by their paths.
RELOADS: dict[str, dict[str, dict[str, Any]]] = {
    "vllm": {"/collective_rpc": {"method": "reload_weights"}, **_WITHOUT_CACHE},
    "sglang": {"/update_weights_from_disk": {"model_path": _FOLDER}},
}
#: Adapters get the model's name that completions are then asked for.
_ADAPTERS = {
    "vllm": {
        "/v1/load_lora_adapter": {"lora_name": _MODEL, "lora_path": _FOLDER, "load_inplace": True},
        **_WITHOUT_CACHE,
    }
}
#: More seconds than a socket, or a thread, can be told to wait.
_MOST_SECONDS = 1e6


class _LogProbs(TypedDict):
    token_logprobs: list[float]


class _Choice(TypedDict):
    index: int
    token_ids: list[int]
    logprobs: NotRequired[_LogProbs | None]


class _Completions(TypedDict):
    choices: list[_Choice]


class _Model(TypedDict):
    id: str


class _Models(TypedDict):
    data: list[_Model]


@dataclass(frozen=True)
class RolloutServer:
    """A server of OpenAI's completions API that takes prompts of token ids and gives token ids, as vLLM does.

    With the environment variable OPENAI_API_KEY, requests have it as their bearer token.

    Args:
        url: http or https, a host, a port, and a path before that of the API, if any.
        model: its name there; None: the only one that the server lists.
        timeout: seconds that one answer may take.
        reload: how the server is told of new weights: a name of `RELOADS`, or the bodies of POST requests by their
            paths, in whose texts "{folder}" and "{model}" are replaced.

    Raises:
        UserError: the URL, or `reload`, has another form.
    """

    url: str
    model: str | None = None
    timeout: float = 600.0
    reload: str | Mapping[str, Mapping[str, Any]] = "vllm"

    def __post_init__(self) -> None:
        check_number("rollout_timeout", self.timeout, most=_MOST_SECONDS, is_above=True)
        if not _is_url(self.url):
            raise UserError(f"rollout_server={self.url!r}: expected a URL such as http://localhost:8000")
        requests, names = self.reload, ", ".join(RELOADS)
        is_named = isinstance(requests, str) and requests in RELOADS
        if not is_named and not (
            isinstance(requests, Mapping)
            and requests
            and all(
                isinstance(path, str) and path.startswith("/") and isinstance(body, Mapping)
                for path, body in requests.items()
            )
        ):
            raise UserError(
                f"rollout_reload={requests!r}: expected one of {names}, or bodies of requests by their paths"
            )
        try:
            text = json.dumps({} if isinstance(requests, str) else requests)
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"rollout_reload={requests!r}: a body is no JSON: {error}") from error
        if _MODEL in text and self.model is None:
            raise UserError(f"rollout_reload has {_MODEL}, which is rollout_server_model, and that is None; give it")

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        max_tokens: int,
        seed: int,
        *,
        end: int | None,
        vocabulary: int,
        has_log_probs: bool = False,
        **sampling: Any,
    ) -> Rollouts:
        """Completions of each prompt by the server's weights, from the model's distribution as the arguments say.

        Args:
            prompts: token ids.
            count: completions of each.
            max_tokens: the most tokens of a completion.
            seed: of sampling, where the server takes one.
            end: the token that ends a completion, with which it is given.
            vocabulary: the number of tokens that the model knows.
            has_log_probs: whether log-probabilities of the tokens are asked for.
            sampling: temperature, top_p, top_k, repetition_penalty, and other entries of the request.

        Raises:
            UserError: the server cannot be reached, takes too long, or gives something else.
        """
        path, num_completions = "/v1/completions", count * len(prompts)
        asked = {
            "model": self._model(),
            "prompt": [list(prompt) for prompt in prompts],
            "n": count,
            "max_tokens": max_tokens,
            "seed": seed,
            "return_token_ids": True,
            "stream": False,
            **_NEUTRAL,
            **sampling,
            # Some servers do not take 0 for all of them, and all that are known take -1.
            **({"top_k": -1} if sampling.get("top_k") == 0 else {}),
            **({} if end is None else {"stop_token_ids": [end]}),
            **({"logprobs": 1} if has_log_probs else {}),
        }
        answer = self._json("POST", path, asked, _Completions)
        choices = {choice["index"]: choice for choice in answer["choices"]}
        if len(answer["choices"]) != num_completions or choices.keys() != set(range(num_completions)):
            raise self._error(
                path,
                f"it gave {len(answer['choices'])} completions with the indices {sorted(choices)[:8]}; expected "
                f"{num_completions}, each index once",
            )
        in_order = [choices[index] for index in range(num_completions)]
        log_probs = None
        if has_log_probs:
            log_probs = [(choice.get("logprobs") or {"token_logprobs": []})["token_logprobs"] for choice in in_order]
        rollouts = Rollouts([choice["token_ids"] for choice in in_order], log_probs)
        if problem := rollouts.problem(max_tokens, vocabulary):
            raise self._error(path, f"{problem}{', as rollout_sync_steps above 1 needs' if has_log_probs else ''}")
        return rollouts

    def load(self, folder: Path, *, are_adapters: bool) -> None:
        """Tell the server to read the weights in a folder. Raises UserError where it does not."""
        requests: Any = self.reload
        if isinstance(requests, str):
            known = _ADAPTERS if are_adapters else RELOADS
            if requests not in known or (are_adapters and self.model is None):
                raise UserError(
                    f"rollout_reload={requests!r}: how it loads adapters is known of vllm alone, with "
                    "rollout_server_model, the name to load them under; give the bodies of requests by their paths"
                )
            requests = known[requests]
        values = {_FOLDER: str(folder.absolute()), _MODEL: self.model or ""}
        for path, body in requests.items():
            self._ask("POST", path, _filled(body, values))

    def _model(self) -> str:
        if self.model is not None:
            return self.model
        path = "/v1/models"
        names = [entry["id"] for entry in self._json("GET", path, None, _Models)["data"]]
        if len(names) != 1:
            raise self._error(path, f"it lists {', '.join(names) or 'no model'}; name one by rollout_server_model")
        return names[0]

    def _json(self, method: str, path: str, body: Any, shape: Any) -> Any:
        answer = self._ask(method, path, body)
        try:
            return strict_json.parse(answer, "its answer", shape, error=UserError)
        except UserError as error:
            raise self._error(
                path, f"{error}; the server must speak OpenAI's completions API with return_token_ids, as vLLM does"
            ) from error

    def _ask(self, method: str, path: str, body: Any) -> bytes:
        """The body of the answer to a request."""
        parts = urlsplit(self.url)
        made = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        assert parts.hostname is not None
        connection = made(parts.hostname, parts.port, timeout=self.timeout)
        try:
            connection.connect()
            with _at_most(self.timeout, connection.sock):
                connection.request(
                    method, parts.path.rstrip("/") + path, None if body is None else json.dumps(body), headers
                )
                response = connection.getresponse()
                answer = bytearray()
                while part := response.read1(1 << 16):
                    answer += part
                    if len(answer) > strict_json.MOST_BYTES:
                        raise self._error(path, f"its answer has more than {strict_json.MOST_BYTES} bytes")
                if response.length:
                    raise http.client.IncompleteRead(bytes(answer[:0]), response.length)
        except UserError:
            raise
        except TimeoutError as error:
            raise self._error(path, f"it took longer than rollout_timeout={self.timeout:g} seconds") from error
        except ValueError:  # its text has the key
            raise self._error(path, "its URL, or OPENAI_API_KEY, has characters that no request can have") from None
        except (OSError, http.client.HTTPException) as error:
            raise self._error(
                path, f"it cannot be reached ({error or type(error).__name__}); is it running?"
            ) from error
        finally:
            connection.close()
        if not 200 <= response.status < 300:
            text = " ".join(answer[:300].decode(errors="replace").split())
            raise self._error(path, f"it answered {response.status} {response.reason}: {text}")
        return bytes(answer)

    def _error(self, path: str, problem: str) -> UserError:
        return UserError(f"rollout_server={self.url!r}, {path}: {problem}")


def _is_url(text: Any) -> bool:
    """Whether a server can have this URL."""
    if not isinstance(text, str):
        return False
    try:
        parts = urlsplit(text)
        has_host = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # of a port, or of brackets
        return False
    return has_host and not (parts.query or parts.fragment or parts.username is not None)


@contextmanager
def _at_most(seconds: float, connected: socket.socket) -> Iterator[None]:
    """Context manager for an exchange over a socket. Raises TimeoutError where it takes longer.

    The socket's own timeout begins anew with each byte, so that of a server that sends one now and then would not end.
    """
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        with suppress(OSError):  # it is closed already
            socket.socket.shutdown(connected, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        if is_late.is_set():
            raise TimeoutError from error
        raise
    finally:
        timer.cancel()
    if is_late.is_set():
        raise TimeoutError


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    """A body of a request with the words that stand for others."""
    if isinstance(value, Mapping):
        return {name: _filled(part, values) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(part, values) for part in value]
    if isinstance(value, str):
        for word, meant in values.items():
            value = value.replace(word, meant)
    return value
