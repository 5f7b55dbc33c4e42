"""Rollouts of a server of OpenAI's API and of a function, rewards of models, and evaluation by rewards."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import GenerationConfig, LlamaForCausalLM, LlamaForSequenceClassification

from examples.grpo import tokenizer
from hf_gpipe.errors import UserError
from hf_gpipe.tasks.grpo.rewards import Rewards
from hf_gpipe.tasks.grpo.server import RolloutServer
from tests.oracle import tiny_config
from tests.trainers.test_grpo import LETTERS, made_trainer, small, trained
from tests.training.toy import weights

GREEDY: dict[str, Any] = {"top_k": 1, "max_steps": 3, "save_steps": 3}


class Model:
    """The part of a server of vLLM that is used: it generates greedily, by the weights that it was last told of.

    Where the completions of a prompt are unlike, their first tokens are the most likely one, the next one and so on.
    """

    def __init__(self, *, are_unlike: bool = False) -> None:
        self.are_unlike = are_unlike
        self.calls: list[tuple[str, Any]] = []
        self.model: Any = None

    def answer(self, path: str, body: Any) -> Any:
        self.calls.append((path, body))
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "policy", "object": "model"}]}
        if path != "/v1/completions":
            if "folder" in body:
                self.load(body["folder"])
            return {}
        assert body["top_k"] == 1
        choices = []
        for prompt in body["prompt"]:
            for number in range(body["n"]):
                place = number if self.are_unlike else 0
                tokens, log_probs = self._greedy(list(prompt), body["max_tokens"], body["stop_token_ids"], place)
                given = {"token_logprobs": log_probs} if "logprobs" in body else None
                choices.append({"index": len(choices), "token_ids": tokens, "finish_reason": "stop", "logprobs": given})
        return {"choices": choices[::-1], "usage": {}}

    def load(self, folder: str) -> None:
        if (Path(folder) / "adapter_config.json").exists():
            self.model = PeftModel.from_pretrained(small(), folder)
        else:
            self.model = LlamaForCausalLM.from_pretrained(folder)

    @torch.no_grad()
    def _greedy(self, ids: list[int], most: int, ends: list[int], place: int = 0) -> tuple[list[int], list[float]]:
        made: list[int] = []
        found: list[float] = []
        while len(made) < most and not (made and made[-1] in ends):
            log_probs = self.model(input_ids=torch.tensor([ids + made])).logits[0, -1].log_softmax(-1)
            made.append(int(log_probs.sort(descending=True).indices[0 if made else place]))
            found.append(float(log_probs[made[-1]]))
        return made, found


@contextmanager
def serving(answer: Any) -> Iterator[str]:
    """The URL of a server, whose answers a function gives: JSON, or (status, bytes, perhaps the length it says)."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            found = answer(self.path, json.loads(body or b"null"))
            status, content, *length = found if isinstance(found, tuple) else (200, json.dumps(found).encode())
            self.send_response(status)
            self.send_header("Content-Length", str(*(length or [len(content)])))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST  # noqa: N815  # the name that the library calls

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


def by_place(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Rewards that differ for equal completions, as those of greedy generation are."""
    return [number % 3 + ids[0] / 10 for number, ids in enumerate(completion_ids)]


def compared(run: Any, other: Any, names: tuple[str, ...] = ("loss", "grad_norm", "reward", "kl")) -> None:
    """Two runs have the same numbers, to the last bit, and so have their weights."""
    (made, logs), (second, others) = run, other
    assert len(logs) == len(others) > 0
    for log, its in zip(logs, others, strict=True):
        assert {name: log.get(name) for name in names} == {name: its.get(name) for name in names}
    found = weights(second)
    for name, parameter in weights(made).items():
        assert torch.equal(found[name], parameter), name


def test_a_server_is_the_pipeline_s_own_generation(tmp_path: Path) -> None:
    """Bit-equal where generation is greedy: it gets the weights before each step.

    The completions of a prompt are equal then, so that the divergence from the reference alone has a gradient.
    """
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], lora_alpha=64, init_lora_weights=False)
    values: dict[str, Any] = {**GREEDY, "num_iterations": 2, "beta": 0.5, "peft_config": lora}
    own = trained(tmp_path / "own", small(), by_place, **values)
    served = Model()
    with serving(served.answer) as url:
        reload = {"/reload": {"folder": "{folder}"}, "/reset_prefix_cache": {}}
        options: dict[str, Any] = {"rollout_server": url, "rollout_reload": reload}
        run = trained(tmp_path / "served", small(), by_place, **values | options)
    compared(own, run)
    assert all(log["grad_norm"] > 1e-3 for log in own[1])
    paths = [path for path, _ in served.calls]
    assert paths == ["/reload", "/reset_prefix_cache", "/v1/models", "/v1/completions"] * 3
    asked = served.calls[3][1]
    assert {name: asked[name] for name in ("model", "n", "temperature", "top_p", "repetition_penalty", "min_p")} == {
        **{"model": "policy", "n": 3, "temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "min_p": 0.0}
    }
    assert len(asked["prompt"]) == 2
    folder = tmp_path / "served" / "rollout_weights"
    assert served.calls[0][1] == {"folder": str(folder)}
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]


def test_weights_of_every_other_step(tmp_path: Path) -> None:
    """The loss takes the ratio to the probabilities by which tokens were sampled; an evaluation has new weights."""
    served = Model(are_unlike=True)
    with serving(served.answer) as url:
        made, recorder = made_trainer(
            *(tmp_path, small(), by_place),
            **GREEDY | {"max_steps": 4, "rollout_server": url, "rollout_sync_steps": 2, "rollout_server_model": "it"},
            rollout_reload={"/reload": {"folder": "{folder}"}},
            epsilon=1e-4,
        )
        made.train()
        paths = [path for path, _ in served.calls]
        assert paths == ["/reload", *["/v1/completions"] * 2] * 2
        logs = [log for log in recorder.logs if "clip_ratio/region_mean" in log]
        assert [log["clip_ratio/region_mean"] > 0 for log in logs] == [False, True, False, True]
        served.calls.clear()
        metrics = made.evaluate(LETTERS)
        assert [path for path, _ in served.calls][:2] == ["/reload", "/v1/completions"]
        assert metrics["eval_reward"] > 0
        saved = dict(LlamaForCausalLM.from_pretrained(tmp_path / "rollout_weights").named_parameters())
        assert all(torch.equal(saved[name], parameter) for name, parameter in weights(made).items())
        served.calls.clear()
        made.train()  # from a step at which the server had other weights
        assert [path for path, _ in served.calls] == paths


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((503, b"loading"), r"it answered 503 .*: loading"),
        ((200, b"<html>"), "its answer is damaged: it is not JSON .*with return_token_ids, as vLLM does"),
        (
            {"choices": [{"index": 0, "text": "a"}] * 2},
            r"'token_ids' is missing in choices\[0\]; the server must speak",
        ),
        (
            {"choices": [{"index": 0, "token_ids": [1]}] * 2},
            r"it gave 2 completions with the indices \[0\]; expected 2",
        ),
        ({"choices": [{"index": 0, "token_ids": [9]}, {"index": 1, "token_ids": []}]}, "completion 1 has 0 tokens"),
        ({"choices": [{"index": 0, "token_ids": [70]}, {"index": 1, "token_ids": [1]}]}, r"1 tokens, \[70\]; expected"),
        ((200, b'{"choices": [', 99), "it cannot be reached .*IncompleteRead.*86 more expected"),
        (
            {"choices": [{"index": n, "token_ids": [1]} for n in (0, 1)]},
            r"1 tokens and the log-probabilities \[\]; exp",
        ),
        (
            (
                200,
                b'{"choices": [{"index": 1, "token_ids": [1]}, '
                b'{"index": 0, "token_ids": [1], "logprobs": {"token_logprobs": [-1e999]}}]}',
            ),
            r"the log-probabilities \[-inf\]; expected a finite one of each token, as rollout_sync_steps above 1 needs",
        ),
        ({"choices": [{"index": 0, "token_ids": ["1"]}]}, r"choices\[0\].token_ids\[0\] is '1' .*, expected"),
    ],
)
def test_answers_that_are_none(answer: Any, message: str) -> None:
    with serving(lambda path, body: answer) as url, pytest.raises(UserError, match=message) as caught:
        RolloutServer(url, "it").complete([[1, 2]], 2, 4, 0, end=0, vocabulary=70, has_log_probs=True)
    assert str(caught.value).startswith(f"rollout_server='{url}', /v1/completions: ")


def test_a_server_that_is_slow_absent_or_of_several_models(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nX-Words: ")
                for _ in range(200):  # each comes before the socket's own timeout
                    connection.sendall(b"a")
                    time.sleep(0.02)

        dripping = threading.Thread(target=drip)
        dripping.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(UserError, match=r"/v1/models: it took longer than rollout_timeout=0.2 seconds"):
            RolloutServer(url, timeout=0.2).complete([[1]], 2, 4, 0, end=0, vocabulary=70)
        dripping.join()

    def slow(path: str, body: Any) -> Any:
        waits.wait(5)
        return {}

    with serving(slow) as url:
        with pytest.raises(UserError, match=r"/v1/models: it took longer than rollout_timeout=0.1 seconds"):
            RolloutServer(url, timeout=0.1).complete([[1]], 2, 4, 0, end=0, vocabulary=70)
        waits.set()
    with pytest.raises(UserError, match=r"/v1/models: it cannot be reached \(.*\); is it running\?"):
        RolloutServer(url).complete([[1]], 2, 4, 0, end=0, vocabulary=70)
    several = {"data": [{"id": "a"}, {"id": "b"}]}
    with serving(lambda path, body: several) as url:
        with pytest.raises(UserError, match="/v1/models: it lists a, b; name one by rollout_server_model"):
            RolloutServer(url).complete([[1]], 2, 4, 0, end=0, vocabulary=70)
        with pytest.raises(UserError, match="how it loads adapters is known of vllm alone, with rollout_server_model"):
            RolloutServer(url, "it", reload="sglang").load(Path("a"), are_adapters=True)
    calls: list[Any] = []
    own: Any = {"/own": {"method": "load", "args": ["{folder}/a", "{model}", 1]}}
    with serving(lambda path, body: calls.append((path, body)) or {}) as url:
        for reload, are_adapters in (("vllm", False), ("sglang", False), ("vllm", True), (own, True)):
            RolloutServer(url, "it", reload=reload).load(Path("/a"), are_adapters=are_adapters)
    assert calls == [
        ("/collective_rpc", {"method": "reload_weights"}),
        ("/reset_prefix_cache", {}),
        ("/update_weights_from_disk", {"model_path": "/a"}),
        ("/v1/load_lora_adapter", {"lora_name": "it", "lora_path": "/a", "load_inplace": True}),
        ("/reset_prefix_cache", {}),
        ("/own", {"method": "load", "args": ["/a/a", "it", 1]}),
    ]
    with serving(lambda path, body: {}) as url:
        monkeypatch.setenv("OPENAI_API_KEY", "sk\n1")
        with pytest.raises(UserError, match="/v1/models: its URL, or OPENAI_API_KEY, has characters that no request"):
            RolloutServer(url).complete([[1]], 2, 4, 0, end=0, vocabulary=70)


def test_rollouts_of_a_function(tmp_path: Path) -> None:
    """Those of the pipeline itself give the same run; each error names what the function gave."""
    words, seen = tokenizer(), []

    def own(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = words(prompts)["input_ids"]
        completions = [
            trainer.pipe.generate(
                input_ids=torch.tensor([row]), max_new_tokens=4, do_sample=False, eos_token_id=0, pad_token_id=0
            )[0, len(row) :].tolist()
            for row in ids
        ]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None, "place": list(range(len(ids)))}

    def reward(place: list[int] | None = None, **columns: Any) -> list[float]:
        seen.append(place)
        return by_place(**columns)

    run = trained(tmp_path / "function", small(), reward, **GREEDY, rollout_func=own)
    compared(trained(tmp_path / "own", small(), by_place, **GREEDY), run)
    assert seen[0] == list(range(6))
    made, _ = run
    right = own(["a:"] * 6, made)
    for wrong, message in (
        ({"completion_ids": [[1]]}, r"rollout_func gave \['completion_ids'\]; expected a dict with prompt_ids, compl"),
        (right | {"completion_ids": [["a"]] * 6}, r"completion_ids\[0\]\[0\] is 'a' .*, expected a valid integer"),
        (right | {"completion_ids": [[]] * 6}, "completion 0 has 0 tokens"),
        (right | {"completion_ids": [[1]] * 5}, "rollout_func gave 5 completions for 6 prompts"),
        (right | {"prompt_ids": [[5]] * 6}, "rollout_func gave other prompt_ids"),
        (right | {"logprobs": [[0.0]] * 5}, "or logprobs of other numbers"),
        (right | {"logprobs": []}, "or logprobs of other numbers"),
        (right | {"logprobs": [[-math.inf] * len(ids) for ids in right["completion_ids"]]}, "expected a finite one of"),
        (right | {"env_mask": [[1]] * 6}, "rollout_func gave 'env_mask': every token must be the model's own"),
        (right | {"prompts": ["a"] * 6}, "rollout_func gave 'prompts', which reward functions get from the trainer"),
        (None, "rollout_func gave None; expected a dict"),
    ):
        # Prompts of one letter, of which there are two.
        made._rollout_func = lambda prompts, trainer, wrong=wrong: wrong
        made.train_dataset.rows[:] = [{"prompt": "a:"}] * 4
        made.train_dataset._ids[:] = [words("a:")["input_ids"]] * 4
        with pytest.raises(UserError, match=message):
            made.train()
    made._rollout_func = lambda prompts, trainer: 1 / 0
    with pytest.raises(UserError, match="rollout_func failed: ZeroDivisionError"):
        made.train()
    with pytest.raises(UserError, match="rollout_func: rollout_server is given too"):
        made_trainer(tmp_path, small(), by_place, rollout_func=own, rollout_server="http://a")


def test_models_as_rewards(tmp_path: Path) -> None:
    """The first logit at the last token, whatever fills shorter rows; messages go through the chat template."""
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] }}:{% endfor %}"
    torch.manual_seed(1)
    config = tiny_config("llama", num_labels=1, eos_token_id=0)
    config.pad_token_id = None
    model = LlamaForSequenceClassification(config)
    model.save_pretrained(tmp_path / "judge")
    words.save_pretrained(tmp_path / "judge")
    rewards = Rewards([str(tmp_path / "judge"), by_place])
    assert rewards.names == ["judge", "by_place"]
    rewards.load(torch.device("cpu"))
    columns: dict[str, Any] = {"prompts": ["a:", "b:"], "completions": ["abc", "d"], "completion_ids": [[1], [2]]}
    found = rewards(columns)
    model.config.pad_token_id = 0
    with torch.no_grad():
        expected = [float(model(torch.tensor([words(text)["input_ids"]])).logits[0, 0]) for text in ("a:abc", "b:d")]
    torch.testing.assert_close(found[:, 0], torch.tensor(expected))
    assert found[:, 1].tolist() == pytest.approx([0.1, 1.2])
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    messages = {"prompts": [[question]], "completions": [[answer]]}
    one = Rewards(model, words)
    one.load(torch.device("cpu"))
    with torch.no_grad():
        by_hand = float(model(torch.tensor([words("a:b:")["input_ids"]])).logits[0, 0])
    assert float(one({**messages, "completion_ids": [[1]]})) == pytest.approx(by_hand, abs=1e-6)
    with pytest.raises(UserError, match="reward_processing_classes has 1 entries for 2 reward_funcs"):
        Rewards([model, by_place], [words])
    LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    with pytest.raises(UserError, match=r"has no weights of score\.weight, so its rewards would be random"):
        Rewards(str(tmp_path / "plain"), words).load(torch.device("cpu"))
    _, (log,) = trained(
        tmp_path / "run", small(), [model, by_place], max_steps=1, reward_processing_classes=[words, None]
    )
    parts = [log[f"rewards/{name}/mean"] for name in ("LlamaForSequenceClassification", "by_place")]
    assert log["reward"] == pytest.approx(sum(parts), rel=1e-6)


def test_evaluation_by_rewards(tmp_path: Path) -> None:
    """Of greedy completions they are those of plain generation, whatever the generation_config says."""
    model = small()
    model.generation_config = GenerationConfig(do_sample=True, repetition_penalty=50.0, min_new_tokens=4, num_beams=2)
    seen: list[list[list[int]]] = []

    def reward(completion_ids: list[list[int]], letter: list[str], **columns: Any) -> list[float]:
        seen.append(completion_ids)
        return [float(sum(ids)) for ids in completion_ids]

    values = {"num_generations_eval": 1, "per_device_eval_batch_size": 3, "eval_dataset": LETTERS, "top_k": 1}
    made, recorder = made_trainer(tmp_path, model, reward, eval_strategy="steps", eval_steps=1, **values)
    metrics = made.evaluate()
    plain = small()
    with torch.no_grad():
        expected = [Model._greedy(_Holder(plain), row["prompt_ids"], 4, [0])[0] for row in made.eval_dataset]
    assert [ids for batch in seen for ids in batch] == expected
    # As every metric, the mean over the mini-batches, here of three prompts and of one.
    sums = [float(sum(ids)) for ids in expected]
    assert metrics["eval_reward"] == pytest.approx((sum(sums[:3]) / 3 + sums[3]) / 2)
    assert metrics["eval_rewards/reward/mean"] == metrics["eval_reward"]
    assert metrics["eval_loss"] == 0  # of one completion for each prompt
    made.train()
    evaluated = [log for log in recorder.logs if "eval_reward" in log]
    assert len(evaluated) == 3
    assert all("reward" not in log for log in evaluated)
    assert set(made.evaluate({"one": LETTERS[:1]})) >= {"eval_one_reward", "eval_one_loss"}


class _Holder:
    def __init__(self, model: Any) -> None:
        self.model = model


def test_a_folder_that_weights_must_not_replace(tmp_path: Path) -> None:
    """New weights replace the whole folder: one with other files stays, and so does the model's own."""
    (tmp_path / "own" / "out").mkdir(parents=True)
    (tmp_path / "own" / "notes.txt").touch()
    (tmp_path / "file").touch()
    small().save_pretrained(tmp_path / "model")
    for folder, message in (
        ("own", "it has files, and none of them is the configuration of a model"),
        ("own/out", "output_dir is in it"),
        ("file", "it is no folder"),
        ("model", "the model is in it"),
    ):
        values: dict[str, Any] = {"rollout_server": "http://a", "rollout_weights_dir": str(tmp_path / folder)}
        with pytest.raises(UserError, match=f"rollout_weights_dir is '.*{folder}': {message}, and new weights"):
            made_trainer(tmp_path / "own" / "out", str(tmp_path / "model"), by_place, **values)
