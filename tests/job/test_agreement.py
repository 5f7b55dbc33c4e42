"""Processes that were given different things end with one line that names the key, the values and the processes."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LlamaConfig

from hf_gpipe.checkpoint.source_digest import digest_of_model
from hf_gpipe.commands.train import _settings
from hf_gpipe.errors import DisagreementError
from hf_gpipe.job.agreement import Noted, compare, text_of
from hf_gpipe.job.facts import disagreements
from hf_gpipe.job.store import SECRET_VARIABLE, new_secret, store_on_loopback
from hf_gpipe.model.spec import model_in_memory
from hf_gpipe.recipe import parse_recipe
from tests.forked_command import start_function
from tests.gloo import run_gloo
from tests.job import disagreeing
from tests.oracle import plain_model, tiny_config


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model; another of the same shape; and a copy of the first elsewhere."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("model", "other")):
        torch.manual_seed(seed)
        plain_model(tiny_config("llama", tied=False), dtype=torch.float32).save_pretrained(folder / name)
    weights = load_file(folder / "model" / "model.safetensors")
    torch.manual_seed(1)
    same_shape = {name: torch.rand_like(one) for name, one in weights.items()}
    save_file(same_shape, folder / "other" / "model.safetensors", {"format": "pt"})
    shutil.copytree(folder / "model", folder / "copy")
    return folder / "model", folder / "other", folder / "copy"


def _scripts(what: str, model: Path, other: Path, output: Path) -> list[tuple[int | None, str]]:
    """Start the script in two processes, as torchrun does; returns the exit code of each and what it told."""
    store = store_on_loopback()
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1", SECRET_VARIABLE: new_secret()}
    output.mkdir()
    folders = [output.with_name(f"rank-{rank}") for rank in range(2)]
    started = []
    for rank, folder in enumerate(folders):
        folder.mkdir()
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        words = what, str(model), str(other), str(output)
        started.append(start_function(folder, disagreeing.as_script, *words, variables=common | ranks))
    for one in started:
        one.join(300)
        one.kill()
    return [(one.exitcode, (folder / "run.err").read_text()) for one, folder in zip(started, folders, strict=True)]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("learning_rate", "(PipelineTrainingArguments): learning_rate is 0.001 in process 0, 0.002 in process 1;"),
        ("max_steps", "(PipelineTrainingArguments): max_steps is 1 in process 0, 2 in process 1;"),
        ("model", "arguments of the Pipeline: the digest of the model's files is {model} ("),
        ("weights in memory", "arguments of the Pipeline: the digest of the model's weights is "),
        (
            "configuration",
            "arguments of the Pipeline: the model's config.rms_norm_eps is 1e-06 in process 0, 0.001 in process 1;",
        ),
        ("stages", "arguments of the Pipeline: schedule is 'gpipe' in process 0, '1f1b' in process 1;"),
        ("dpo", "(PipelineDPOConfig): beta is 0.1 in process 0, 0.2 in process 1;"),
        ("sft", "(PipelineSFTConfig): max_length is 16 in process 0, 8 in process 1;"),
        ("generate", "arguments of generate: max_new_tokens is 2 in process 0, 3 in process 1;"),
    ],
)
def test_a_script_whose_processes_disagree_ends_with_a_line(
    what: str, message: str, models: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    codes, errors = zip(*_scripts(what, models[0], models[1], tmp_path / "out"), strict=True)
    assert codes == (2, 2), errors
    told = [line for text in errors for line in text.splitlines() if line.startswith("error: ")]
    assert len(told) == 1
    assert message.format(model=models[0]) in told[0]
    assert "process 0" in told[0]
    assert "process 1" in told[0]
    assert told[0].endswith("give all processes the same")
    assert "Traceback" not in "".join(errors)
    assert not list((tmp_path / "out").glob("trained-*"))


def test_processes_that_agree_train_whatever_their_paths(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Each machine may have the model at another path."""
    finished = _scripts("model", models[0], models[2], tmp_path / "out")
    assert [code for code, _ in finished] == [0, 0], finished
    assert len(list((tmp_path / "out").glob("trained-*"))) == 2


RECIPE = """\
model: {config: {model_type: llama}}
data: {kind: text, path: texts}
training: {output_dir: out}
"""


def _compared() -> list[str]:
    rank = torch.distributed.get_rank()
    found = []
    for mine in (
        {"a": rank // 2, "b": 1},
        {"a": 1} if rank else {},
        {"where": Noted("same", f"/path/{rank}")},
        {"where": Noted(f"digest {rank}", f"/path/{rank}")},
        {str(name): rank for name in range(9)},
        _settings(parse_recipe(RECIPE, [f"training.seed={rank}", f"pipeline.threads_per_process={rank + 1}"])),
    ):
        try:
            compare(partial(dict[str, Any], mine), "things")
            found.append("")
        except DisagreementError as error:
            found.append(str(error))
    return found


def test_every_process_is_told_the_same() -> None:
    everyone = run_gloo(_compared, 3)
    assert everyone[0] == everyone[1] == everyone[2]
    two, missing, same, noted, many, recipe = everyone[0]
    assert two == "things: a is 0 in processes 0, 1, 1 in process 2; give all processes the same"
    assert missing == "things: a is missing in process 0, 1 in processes 1, 2; give all processes the same"
    assert same == ""
    assert "where is /path/0 (digest 0) in process 0, /path/1 (digest 1) in process 1" in noted
    assert "also different: 3, 4, 5, 6, 7, 8" in many
    seeds = "0 in process 0, 1 in process 1, 2 in process 2"
    assert recipe == f"things: training.seed is {seeds}; give all processes the same", "threads may differ"


def test_processes_of_a_large_job_are_counted() -> None:
    (told,) = disagreements([("n", {"a": str(int(rank == 5))}) for rank in range(100)])
    assert told == "a is 0 in processes 0, 1, 2, 3, 4, 6, 7, 8 and 91 more, 1 in process 5"


def test_equal_values_have_equal_texts() -> None:
    same: list[tuple[Any, Any]] = [
        (object(), object()),
        ({"b", "a"}, {"a", "b"}),
        (GenerationConfig(num_beams=2), GenerationConfig(num_beams=2)),
        (LlamaConfig(), LlamaConfig()),
        (text_of, text_of),
    ]
    for first, second in same:
        assert text_of(first) == text_of(second)
    different: list[tuple[Any, Any]] = [
        ("a" * 500 + "b", "a" * 500 + "c"),
        (GenerationConfig(num_beams=2), GenerationConfig(num_beams=3)),
        (torch.zeros(3), torch.ones(3)),
        ({"a": 1}, {"a": "1"}),
        (text_of, compare),
    ]
    for first, second in different:
        assert text_of(first) != text_of(second)
        assert len(text_of(first)) < 200


def test_a_digest_of_a_model_s_files_sees_what_matters(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    whole = digest_of_model(models[0])
    assert digest_of_model(models[2]) == whole
    assert digest_of_model(models[1]) != whole
    for number, (file, change) in enumerate(
        [("config.json", b" "), ("model.safetensors", b"x"), ("hf_gpipe_digests.json", b"{}"), ("modeling_own.py", b"")]
    ):
        shutil.copytree(models[0], copy := tmp_path / str(number))
        (copy / "metrics.jsonl").touch()  # no part of the model
        assert digest_of_model(copy) == whole
        with (copy / file).open("ab") as opened:
            opened.write(change)
        assert digest_of_model(copy) != whole, file


def test_one_weight_of_a_model_in_memory() -> None:
    model = plain_model(tiny_config("llama", tied=True))
    before = model_in_memory(model)
    assert model_in_memory(model) == before
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    after = model_in_memory(model)
    assert [name for name in before if before[name] != after[name]] == ["the digest of the model's weights"]
