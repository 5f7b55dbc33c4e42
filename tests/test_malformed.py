"""What a user can get wrong: each malformed recipe, data file, model and directory ends in exit code 2 and one line."""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_gpipe.errors import RecipeError
from hf_gpipe.recipe import parse_recipe
from hf_gpipe.recipe.fields import all_keys
from hf_gpipe.train import main
from scripts import tiny_run
from tests.test_train import ENVIRONMENT, REPOSITORY

pytestmark = pytest.mark.usefixtures("undo_the_command_s_settings", "no_prediction")

KEYS = [(section, key.name) for section, key in all_keys()]

Files = dict[str, bytes | str]
"""Name below the test's folder -> content."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, its pairs and its tokenizer, and a trained model in `model`."""
    folder = tmp_path_factory.mktemp("prepared")
    recipe = tiny_run.prepare(folder)
    words = ["training.max_steps=2", "training.save_steps=2", f"training.output_dir={folder / 'model'}"]
    assert main([str(recipe), *words, "pipeline.num_processes=1", "evaluation.max_examples=1"]) == 0
    return folder


@pytest.fixture
def refused(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command in this process, in one pipeline process; its message, after all that must be so was checked."""

    def run(*words: str, recipe: Path | None = None) -> str:
        own = [f"training.output_dir={tmp_path / 'out'}"] if recipe is None else []
        capsys.readouterr()
        code = main([str(recipe or prepared / "recipe.yaml"), "pipeline.num_processes=1", *own, *words])
        err = capsys.readouterr().err
        assert code == 2, err
        assert err.startswith("error: "), err
        assert err.count("\n") == 1, err
        assert "Traceback" not in err
        assert len(err) < 1500, "a reader wants a message, not a file"
        return err

    return run


# ---------------------------------------------------------------------- recipes


def base(prepared: Path) -> dict[str, Any]:
    return copy.deepcopy(_base(prepared))


@cache
def _base(prepared: Path) -> dict[str, Any]:
    recipe: dict[str, Any] = yaml.safe_load((prepared / "recipe.yaml").read_text())
    recipe["training"]["output_dir"] = str(prepared / "out")
    return recipe


def test_values_of_the_wrong_type(prepared: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    """Every key of a recipe with values that its type does not allow."""
    count = 0
    for path in KEYS:
        if path == ("model", "config"):
            wrong: list[Any] = ["marian", 3, [1], True]
        else:
            wrong = [{"a": 1}, [[1]], float("nan"), -(10**30)]
        for value in wrong:
            if path == ("pipeline", "num_processes"):
                continue  # this test's own override
            if path in (("data", "seed"), ("data", "rank_seed")) and isinstance(value, int):
                continue  # any whole number is a seed
            if path == ("data", "counts") and isinstance(value, dict):
                continue  # a language and its number of pairs
            data = base(prepared)
            section = data.setdefault(path[0], {})
            section[path[1]] = value
            file = tmp_path / "recipe.yaml"
            file.write_text(yaml.safe_dump(data))
            message = refused(recipe=file)
            assert ".".join(path) in message or "expected" in message
            count += 1
    assert count > 120


def test_unknown_keys(prepared: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    """Every key with a letter left out."""
    for section, key in KEYS:
        wrong = key[:-2] + key[-1] if len(key) > 4 else key + "x"
        data = base(prepared)
        data.setdefault(section, {})[wrong] = 1
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(data))
        assert f"{section}.{wrong} is not a key" in refused(recipe=file)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "null",
        "3",
        "[]",
        "model",
        "- model",
        "{}",
        "model: {",
        "model: [1, 2",
        "model:\n\tpath: x",
        "a: b: c",
        "model: *anchor",
        "&a model: *a",
        "model: &a {path: *a}",
        "model: !!python/object/apply:os.system ['echo']",
        "model: !tag {}",
        "? [a]\n: b",
        "? {a: b}\n: c",
        "model: 'unclosed",
        'model: "\\q"',
        "--- {}\n--- {}",
        "model: {path: a, path: b}",
        "data: 1\ndata: 2",
        "%YAML 9.9\n---\nmodel: 1",
        "model: |\n  text\n bad",
        "1: 2",
        "null: 2",
        "true: {}",
        "model: {1: 2}",
        "\x00",
        "model: \x07",
        "<<: {model: 1}",
        "[" * 200,
        "{a: " * 200,
        "a: &x [1]\nb: [*x, *x, *y]",
        "model: {path: " + "9" * 5000 + "}",
        "training: {max_steps: " + "9" * 5000 + "}",
        "training: {learning_rate: 1e999}",
        "model: {path: 2020-01-01, config: 0x10}",
    ],
)
def test_text_that_is_no_recipe(text: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    refused(recipe=tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    "content",
    [
        "model: {path: größe}".encode("latin-1"),
        "model: {}".encode("utf-16"),
        "model: {}".encode("utf-32"),
        b"\xff\xfe\x00",
        bytes(range(256)),
        # Without the time of writing, by which two processes that share the tests out would name this one differently.
        gzip.compress(b"model: {}", mtime=0),
        b"\x89PNG\r\n\x1a\n",
        b"\xed\xa0\x80",
    ],
)
def test_bytes_that_are_no_recipe(content: bytes, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "recipe.yaml").write_bytes(content)
    refused(recipe=tmp_path / "recipe.yaml")


def test_recipes_that_cannot_be_read(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("missing.yaml", ".", "loop", "dangling", "a" * 300, "missing/recipe.yaml", "a\x00b", "/dev/zero"):
        refused(recipe=tmp_path / name)


@pytest.mark.parametrize(
    "word",
    [
        *("training", "=", "=3", ".=3", "training.=3", ".training=3", "training..max_steps=3", "training.max_steps"),
        *("training.max_steps=[", "training.max_steps=: :", "training.max_steps.x=1", "training=3", "model=marian"),
        *("pipeline.num_stages=1e3", "pipeline.num_stages=4.0", "pipeline.num_stages='4'"),
        *("pipeline.num_stages=true", "pipeline.partition=cout"),
        *("pipeline.num_stages=2000000000", "pipeline.replicas=2000000000", "pipeline.num_micro_batches=2000000000"),
        *("pipeline.replicas=[2000000000, 1, 1]", "training.gradient_accumulation_steps=2000000000"),
        "tokenizer={vocab_size: 2000000000}",
        *("pipeline.num_stages=-1", "pipeline.num_stages=99999999999999999999", "pipeline.num_micro_batches=.5"),
        *(
            "pipeline.partition=[1]",
            "pipeline.partition=[1, 2, 99]",
            "pipeline.partition=[]",
            "pipeline.partition=cout",
        ),
        *(
            "pipeline.device=tpu",
            "pipeline.threads_per_process=100000",
            "pipeline.timeout_seconds=0",
            "pipeline.timeout_seconds=.inf",
            "pipeline.timeout_seconds=1e300",
            "model.dtype=int8",
        ),
        *("model.config.d_model=x", "model.config.d_model=0", "model.config.d_model=-8", "model.config.d_model=.nan"),
        *(
            "model.config.encoder_attention_heads=3",
            "model.config.dropout=x",
            "model.config.encoder_attention_heads=-1",
        ),
        # A model without blocks was trained.
        *("model.config.encoder_layers=-1", "model.config.init_std=.nan", "model.config.max_position_embeddings=0"),
        *("model.config.model_type=../..", "model.config.model_type=[]", "model.config.model_type=vit"),
        *("model.config.activation_function=gelo", "model.config.vocab_size=-5", "model.config.vocab_size=x"),
        *("model.config.encoder_layers=10000000", "model.attn_implementation=kernels-community/flash-attn"),
        *("model.attn_implementation=flash_attention_9", "model.attn_implementation=x", "model.config.auto_map={a: b}"),
        *("data.validation_fraction=0.95", "data.test_fraction=1", "data.languages=[xx]", "data.target_tag=true"),
        *("data.source_field=nothing", "data.language_field=nothing", "data.max_source_tokens=1", "data.kind=csv"),
        *("data={kind: cldr, languages: [xx]}", "data={kind: cldr}", "data.split_by=both", "data.max_examples=0"),
        *("tokenizer.path=/nowhere", "tokenizer.path='$(touch x)'", "tokenizer.vocab_size=0", "tokenizer.path=''"),
        *(
            "training.optim=adam; rm",
            "training.learning_rate=-1",
            "training.learning_rate=1e400",
            "training.batch_size=0",
        ),
    ],
)
def test_overrides(word: str, refused: Callable[..., str]) -> None:
    refused(word)


def test_mutated_recipes_are_recipes_or_refused(prepared: Path) -> None:
    """Letters left out, doubled, exchanged: whatever comes of it, the reader of recipes says so in its own words."""
    text, refusals = (prepared / "recipe.yaml").read_text(), 0
    for seed in range(300):
        generator, letters = random.Random(seed), list(text)
        for _ in range(generator.randint(1, 6)):
            place = generator.randrange(len(letters))
            letters[place] = generator.choice(["", letters[place] * 2, *"{}[]:,&*!|>'\"%@`#-\n\t \x00é", "1e9", "null"])
        try:
            parse_recipe("".join(letters))
        except RecipeError:
            refusals += 1
    assert refusals > 150


# ---------------------------------------------------------------------- data


GOOD = '{"source": "a", "target": "b"}\n'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n  \n",
        b"\xef\xbb\xbf",
        bytes(range(256)) * 4,
        random.Random(0).randbytes(2000),
        gzip.compress(GOOD.encode(), mtime=0),
        GOOD.encode("utf-16"),
        (GOOD * 3).encode() + b"\xff\xfe\n",
        '{"source": "größe", "target": "size"}\n'.encode("latin-1"),
        b"null\n",
        b"3\n",
        b'"text"\n',
        b"[]\n",
        b'["source", "target"]\n',
        b"{\n",
        b"{}\n",
        b'{"source": "a"}\n',
        b'{"source": "a", "target": ""}\n',
        b'{"source": "  ", "target": "b"}\n',
        b'{"source": null, "target": "b"}\n',
        b'{"source": 1, "target": "b"}\n',
        b'{"source": ["a"], "target": "b"}\n',
        b'{"source": {"a": 1}, "target": "b"}\n',
        b'{"Source": "a", "Target": "b"}\n',
        b'{"source": "a", "target": "b"\n',
        b'{"source": "a", "target": "b"}}\n',
        b'{"source": "a" "target": "b"}\n',
        b"{'source': 'a', 'target': 'b'}\n",
        b'{"source": "a", "target": NaN}\n',
        b'{"source": "a", "target": 1e999}\n',
        b'{"source": "a", "target": ' + b"9" * 6000 + b"}\n",
        b"[" * 100_000 + b"\n",
        b'{"a":' * 100_000 + b"\n",
        b'{"source": ' + b"[" * 500 + b"]" * 500 + b', "target": "b"}\n',
        b"source,target\na,b\n",
        b"a\tb\n",
        GOOD.encode() * 2 + b"{\n",
        GOOD.encode(),
        b'{"source": "a\\ud800", "target": "b"}\n' * 50,
    ],
)
def test_data_files(content: bytes, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "pairs.jsonl").write_bytes(content)
    message = refused(f"data.path={tmp_path / 'pairs.jsonl'}")
    assert "pairs" in message or "corpus" in message


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not gzip",
        gzip.compress((GOOD * 999).encode(), mtime=0)[:-20],
        gzip.compress(random.Random(1).randbytes(5000), mtime=0)[:2000],
        gzip.compress(GOOD.encode(), mtime=0)[:-4] + b"\x00\x00\x00\x01",
        gzip.compress(GOOD.encode(), mtime=0) + b"junk",
        gzip.compress(b"\xff\xfe", mtime=0),
        gzip.compress(b"", mtime=0),
    ],
)
def test_gzipped_data_files(content: bytes, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "pairs.jsonl.gz").write_bytes(content)
    refused(f"data.path={tmp_path / 'pairs.jsonl.gz'}")


def test_data_paths(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name in (".", "loop", "dangling", "pipe", "missing", "a" * 300, "x/y", "/dev/null", "/dev/zero", "~/pairs"):
        refused(f"data.path={tmp_path / name}")
    refused('data.path="a\\0b"')


# ---------------------------------------------------------------------- directories


def test_output_directories(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to("/proc/nowhere")
    for name in ("file", "file/out", "loop", "dangling", "/proc/out", "/dev/null", "a" * 300, "/sys"):
        assert "directory" in refused(f"training.output_dir={tmp_path / name}")
    refused('training.output_dir="a\\0b"')


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_permissions(tmp_path: Path, refused: Callable[..., str]) -> None:
    for name in ("recipe.yaml", "pairs.jsonl", "out"):
        (tmp_path / name).mkdir() if name == "out" else (tmp_path / name).touch()
        (tmp_path / name).chmod(0o000)
    refused(recipe=tmp_path / "recipe.yaml")
    refused(f"data.path={tmp_path / 'pairs.jsonl'}")
    refused(f"training.output_dir={tmp_path / 'out'}")
    (tmp_path / "out").chmod(0o700)


def copy_of(folder: Path, to: Path) -> Path:
    """The files of a directory, without those below."""
    to.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            (to / path.name).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"null", b'"a"', b"{}", b"\xff\xfe", bytes(range(256))])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer_config.json"])
def test_broken_files_of_a_model(
    name: str, content: bytes, prepared: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    folder = copy_of(prepared / "model", tmp_path / "model")
    (folder / name).write_bytes(content)
    if name == "tokenizer_config.json":
        if content == b"{}":
            pytest.skip("a tokenizer may have no options")
        refused(f"tokenizer.path={folder}")
    else:
        refused("model.config={}", f"model.path={folder}")


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "nothing"},
        {"model_type": 7},
        {"model_type": None},
        {"model_type": "vit"},
        {"d_model": "x"},
        {"d_model": None},
        {"d_model": 16},
        {"d_model": 0},
        {"encoder_layers": 1.5},
        {"encoder_layers": 99},
        {"vocab_size": 3},
        {"vocab_size": "many"},
        {"encoder_attention_heads": 0},
        {"activation_function": "nothing"},
        {"max_position_embeddings": -1},
        {"auto_map": {"AutoConfig": "module.Class"}, "model_type": "unheard"},
        {"dtype": "nothing"},
        {"encoder_layers": 10_000_000},
        {"eos_token_id": float("nan")},
        {"eos_token_id": "</s>"},
        {"bos_token_id": [1, "2"]},
        {"decoder_start_token_id": [0, 1]},
        {"num_labels": 10**9},
        {"attention_dropout": -1},
        {"dropout": 1.5},
        {"d_model": 2**41},
        {"d_model": 2**40},
        {"vocab_size": 10**5000 // 10**4000},
        {"task_specific_params": {"a": {"num_layers": 10**7}}},
        {"note": json.loads("[" * 900 + "]" * 900)},
        {"attn_implementation": "kernels-community/flash-attn"},
        {"_attn_implementation": "kernels-community/flash-attn:a"},
        {"attn_implementation": "nothing"},
    ],
)
def test_broken_configurations(
    values: dict[str, Any], prepared: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    folder = copy_of(prepared / "model", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    refused("model.config={}", f"model.path={folder}")


def test_keys_of_a_trained_tokenizer_beside_the_model_s_own(prepared: Path, refused: Callable[..., str]) -> None:
    """They were ignored without a word."""
    words = ("model.config={}", f"model.path={prepared / 'model'}", "tokenizer={vocab_size: 300}")
    assert "tokenizer.vocab_size is 300 (a whole number) and '" in (message := refused(*words))
    assert "has a tokenizer; choose a model without one, or leave vocab_size out" in message


def test_a_tokenizer_s_longest_text_that_is_no_number(
    prepared: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    folder = copy_of(prepared / "model", tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": [1]}))
    assert "model_max_length is [1]" in refused(f"tokenizer.path={folder}")


@pytest.mark.parametrize("value", ["x", 1.5, [None, {}], [], True, 2**60])
def test_broken_configurations_of_generation(
    value: Any, prepared: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    folder = copy_of(prepared / "model", tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    refused("model.config={}", f"model.path={folder}")


def _header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 8,
        b"\xff" * 8,
        b"\xff" * 64,
        _header(b"{}"),
        _header(b"{"),
        _header(b"[]"),
        _header(b'{"a": 1}'),
        _header(b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'),
        _header(b'{"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}') + b"\x00" * 16,
        _header(b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 99]}}') + b"\x00" * 16,
        _header(b'{"a": {"dtype": "pickle", "shape": [4], "data_offsets": [0, 16]}}') + b"\x00" * 16,
        b"\x80\x04\x95pickle",
        b"PK\x03\x04" + b"\x00" * 40,
        None,
        "half",
    ],
)
def test_broken_weights(
    content: bytes | str | None, prepared: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    folder = copy_of(prepared / "model", tmp_path / "model")
    for shard in folder.glob("*.safetensors"):
        if content is None:
            shard.unlink()
        else:
            whole = shard.read_bytes()
            shard.write_bytes(content if isinstance(content, bytes) else whole[: len(whole) // 2])
    assert "model" in refused("model.config={}", f"model.path={folder}")


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "..", ".", "", "a/../../b", "sub/model.safetensors", 7, None, ["x"], "nowhere"]
)
def test_an_index_leads_nowhere_else(name: Any, prepared: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    folder = copy_of(prepared / "model", tmp_path / "model")
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], name)
    file.write_text(json.dumps(index))
    (tmp_path / "secret").write_bytes(next(folder.glob("*.safetensors")).read_bytes())
    message = refused("model.config={}", f"model.path={folder}")
    assert "index" in message or "nowhere" in message


def test_models_that_are_none(prepared: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    pickled = copy_of(prepared / "model", tmp_path / "pickled")
    for shard in [*pickled.glob("*.safetensors"), pickled / "model.safetensors.index.json"]:
        shard.unlink()
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    assert "safetensors" in refused("model.config={}", f"model.path={pickled}")
    for name in ("empty", "file", "loop", "missing", "a" * 300, "file/x"):
        refused("model.config={}", f"model.path={tmp_path / name}")
        refused(f"tokenizer.path={tmp_path / name}")


@pytest.mark.parametrize(
    "files",
    [
        {"recipe.yaml": "{"},
        {"recipe.yaml": "3"},
        {"recipe.yaml": b"\xff\xfe"},
        {"checkpoint-2/config.json": "{"},
        {"checkpoint-2/trainer_state.json": "{"},
        {"checkpoint-2/trainer_state.json": "[]"},
        {"checkpoint-2/trainer_state.json": '{"unheard": 1}'},
        {"checkpoint-2/tokenizer_config.json": "["},
        {"checkpoint-2/tokenizer.json": "[", "checkpoint-2/tokenizer_config.json": "["},
    ],
)
def test_runs_to_resume_that_are_damaged(
    files: Files, prepared: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    shutil.copytree(prepared / "model", tmp_path / "out")
    for name, content in files.items():
        (tmp_path / "out" / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused("training.max_steps=3")


# ---------------------------------------------------------------------- processes of their own


@pytest.mark.parametrize("words", [["missing.yaml"], ["RECIPE", "pipeline.num_stages=many"]])
def test_the_command_in_a_process(words: list[str], prepared: Path) -> None:
    """Some of the above through the real command. tests/test_train.py has an error of the processes of a job."""
    own = [str(prepared / "recipe.yaml") if word == "RECIPE" else word for word in words]
    command = [sys.executable, "-m", "hf_gpipe.train", *own]
    ended = subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("error: "), ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr
