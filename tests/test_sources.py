"""A name that a user gives is a path of this machine, or an id on the Hub; the Hub is asked for ids alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import transformers

from hf_gpipe.checkpoint.configuration import read_config
from hf_gpipe.data import build_corpus
from hf_gpipe.data.files import check_files
from hf_gpipe.data.tokenizer import read_tokenizer
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.from_recipe.processors import tokenizer_of
from hf_gpipe.from_recipe.tasks import task_of
from hf_gpipe.recipe import DataSection, load_recipe
from hf_gpipe.sources import is_here
from hf_gpipe.tasks.image_text import read_processor
from hf_gpipe.tasks.images import image_corpus, image_processor
from hf_gpipe.training.generating import generation_config_of

RECIPES = Path(__file__).parents[1] / "recipes"
CHAT = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]}
PREFERENCE = {"prompt": "Hello", "chosen": "Hi!", "rejected": "Go away."}


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty directory, in which a question to the Hub fails the test."""

    def asked(name: Any, *args: Any, **options: Any) -> Any:
        pytest.fail(f"the Hub was asked for {name}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", asked)
    monkeypatch.setattr(datasets, "get_dataset_config_names", asked)
    monkeypatch.setattr(transformers.PreTrainedConfig, "get_config_dict", asked)


def test_what_is_here_is_no_id(tmp_path: Path) -> None:
    (tmp_path / "owner/name").mkdir(parents=True)
    (tmp_path / "chats").write_text("")
    assert all(map(is_here, ("owner/name", "chats", Path("chats"))))
    assert not any(map(is_here, ("owner/other", "Qwen/Qwen2.5-7B", "gpt2")))
    for name in ("chats.jsonl", "my/chats.jsonl.GZ", "./other", "~/chats", "/chats", "outputs/causal/lora", Path("a")):
        with pytest.raises(UserError, match=rf"there is no (file|directory) {name} \(looked in {tmp_path}"):
            is_here(name)


@pytest.mark.parametrize("name", ["chat", "lora", "qlora", "offload", "distil"])
def test_recipes_of_chat_models_read_a_file_of_chats(name: str, tmp_path: Path) -> None:
    """qlora.yaml and offload.yaml extended a recipe of translation, and asked the Hub for the file."""
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(CHAT)}\n".replace("Hello", str(n)) for n in range(40)))
    recipe = load_recipe(RECIPES / f"causal/{name}.yaml", ["data.path=chats.jsonl"])
    check_files(recipe.data)
    corpus = task_of(recipe).corpus(recipe)
    assert {read.row["messages"][1]["content"] for read in corpus.train} == {"Hi!"}


def test_the_recipe_of_dpo_reads_a_file_of_preferences(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps(PREFERENCE | {"prompt": n}) + "\n" for n in "abcdefghijkl")
    )
    recipe = load_recipe(RECIPES / "causal/dpo.yaml", ["data.path=pairs.jsonl"])
    assert {read.row["chosen"] for read in task_of(recipe).corpus(recipe).train} == {"Hi!"}


@pytest.mark.parametrize("kind", ["hub", "chat", "text", "preferences", "images", "image_text", "jsonl"])
@pytest.mark.parametrize("path", ["chats.jsonl", "chats.csv", "./chats", "data/chats.parquet", "my/own/chats"])
def test_data_that_are_not_there_are_told_as_files(kind: str, path: str) -> None:
    """A missing file was an error of the Hub, "Couldn't reach 'chats.csv' on the Hub"."""
    labels = {"labels": ["a"]} if kind == "images" else {}
    with pytest.raises(DataError, match=r"data\.path: there is no (file|directory) .*looked in"):
        check_files(DataSection(kind=kind, path=path, **labels))


@pytest.mark.parametrize(
    ("read", "kind", "allowed"),
    [
        (build_corpus, "hub", "data.kind=chat or, for pairs, data.kind=jsonl"),
        (image_corpus, "images", "a directory of"),
    ],
)
def test_a_file_is_no_data_set_of_the_hub(
    read: Callable[[DataSection], Any], kind: str, allowed: str, tmp_path: Path
) -> None:
    """`recipes/causal/qlora.yaml data.path=chats.jsonl` said "Couldn't reach 'chats.jsonl' on the Hub"."""
    (tmp_path / "chats.jsonl").write_text(json.dumps(CHAT))
    data = DataSection(kind=kind, path="chats.jsonl", **({"labels": ["a"]} if kind == "images" else {}))
    with pytest.raises(DataError, match=rf"chats\.jsonl is a file, and data\.kind is {kind}; give .*{allowed}"):
        read(data)


def test_a_file_without_a_suffix_is_read_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "chats").write_text(json.dumps(CHAT))
    recipe = load_recipe(RECIPES / "causal/chat.yaml", ["data.path=chats"])
    with pytest.raises(DataError, match=r"chats has no conversations; names that end in \.jsonl, \.json or \.parquet"):
        task_of(recipe).corpus(recipe)


@pytest.mark.parametrize(
    "read",
    [read_config, read_tokenizer, read_processor, generation_config_of, lambda name: image_processor(name, None, None)],
)
@pytest.mark.parametrize("name", ["./model", "outputs/causal/lora", "model.gguf"])
def test_models_that_are_not_there_are_told_as_paths(read: Callable[[str], Any], name: str) -> None:
    """transformers asked the Hub for a misspelt path, and spoke of private repositories."""
    with pytest.raises(UserError, match=rf"there is no (file|directory) {name} \(looked in .*correct the path"):
        read(name)


def test_a_file_of_weights_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(UserError, match=r"'model\.gguf': it is a file; give the directory of a model in Hub format"):
        read_config("model.gguf")


def test_the_home_directory_is_meant_by_its_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves `model.path=~/model` as it is, and it was taken for an id on the Hub."""
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["model.path=~/model", "data.path=~/chats.jsonl", "tokenizer.path=~/model", "training.output_dir=~/out"]
    recipe = load_recipe(RECIPES / "causal/lora.yaml", words)
    assert (recipe.model.path, recipe.tokenizer.path) == (f"{tmp_path}/model", f"{tmp_path}/model")
    assert (recipe.data.path, recipe.training.output_dir) == (f"{tmp_path}/chats.jsonl", f"{tmp_path}/out")


def test_a_tokenizer_of_the_hub_that_cannot_be_read_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new tokenizer was trained in its place, whose tokens are not those of the model's weights."""

    def fail(name: str, **options: Any) -> Any:
        raise OSError("the Hub is not reached")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    recipe = load_recipe(RECIPES / "translation/decoder-only.yaml")
    with pytest.raises(DataError, match=r"no tokenizer that can be read in 'Qwen/Qwen2\.5-0\.5B': the Hub"):
        tokenizer_of(recipe, corpus=None)  # type: ignore[arg-type]  # it is not looked at
