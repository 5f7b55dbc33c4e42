"""The command: one recipe trains over several processes, resumes, and says in one line what is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_gpipe.recipe import load_recipe
from hf_gpipe.schedule import Placement, build
from hf_gpipe.train import main
from tests import forked_command

pytestmark = pytest.mark.usefixtures("undo_the_command_s_settings", "no_prediction")

REPOSITORY = Path(__file__).parents[1]
# A corpus beside the checkout; where there is none, its test is skipped.
TLDR = Path(os.environ.get("HF_GPIPE_TLDR", REPOSITORY.parent / "shared/data/tldr/tldr.jsonl.gz"))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
STEPS, SAVED = 30, 10

RECIPE = f"""
model:
  config:
    model_type: marian
    d_model: 16
    encoder_layers: 2
    decoder_layers: 2
    encoder_attention_heads: 2
    decoder_attention_heads: 2
    encoder_ffn_dim: 32
    decoder_ffn_dim: 32
    max_position_embeddings: 64
    dropout: 0.1
data:
  kind: cldr
  languages: [de, fr]
  templates: [weekday, month_day]
  examples_per_language: 200
  test_fraction: 0.1
tokenizer: {{vocab_size: 320}}
pipeline: {{num_stages: 2, num_micro_batches: 4, schedule: gpipe, device: cpu}}
training:
  output_dir: OUTPUT
  max_steps: {STEPS}
  batch_size: 8
  learning_rate: 1.0e-3
  lr_scheduler_type: constant
  logging_steps: 1
  save_steps: {SAVED}
evaluation: {{max_examples: 5, max_new_tokens: 8, samples: 2}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The recipe with all that `finished` leaves to the planner, whose work takes as long as a short training."""
    path = tmp_path / "recipe.yaml"
    decided = RECIPE.replace("schedule: gpipe", "schedule: gpipe, partition: count, recompute: stage")
    path.write_text(decided.replace("OUTPUT", str(tmp_path / "out")))
    return path


def forked(recipe: Path, *words: str, num_processes: int = 2) -> subprocess.CompletedProcess[str]:
    process = forked_command.start(recipe.parent, str(recipe), *words, num_processes=num_processes)
    process.join(200)
    out, err = ((recipe.parent / name).read_text() for name in ("run.out", "run.err"))
    return subprocess.CompletedProcess(words, process.exitcode or 0, out, err)


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """An uninterrupted run of the recipe over two processes, as a user starts it."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "recipe.yaml").write_text(RECIPE.replace("OUTPUT", str(folder / "out")))
    command = [sys.executable, "-m", "hf_gpipe.train", str(folder / "recipe.yaml")]
    result = subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    return folder / "out", result


# ---------------------------------------------------------------------- a run


def test_a_run_leaves_everything_behind(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, result = finished
    assert result.returncode == 0, result.stderr
    for word in ("K = 2 stages", "2 processes", "language", "chrF", "Translations", "timeline.png", str(folder)):
        assert word in result.stdout
    (planned, *others) = [line for line in result.stderr.splitlines() if not line.startswith("step ")]
    assert planned.startswith("planner: "), "what the recipe leaves out is chosen, and told once"
    assert "planner" not in result.stdout
    assert others == [f"the model is saved in {folder}"], "other packages speak up"
    assert len(losses(folder)) == STEPS
    metrics = json.loads((folder / "metrics.json").read_text())
    assert {"exact_match", "bleu", "chrf", "chrf_copy", "nll"} <= metrics.keys()
    assert metrics["per_language"].keys() == {"de", "fr"}
    translations = [json.loads(line) for line in (folder / "translations.jsonl").read_text().splitlines()]
    assert (
        len(translations)
        == metrics["num_pairs"]
        == sum(scores["num_pairs"] for scores in metrics["per_language"].values())
    )
    assert all(sample in translations for sample in metrics["samples"])
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "run.html").read_text()
    assert page.count("<svg") == 2, "losses and one step"
    for words in ("<h2>Memory</h2>", "<h2>Bill</h2>", f"{STEPS} steps in "):
        assert words in page
    assert not re.search(r'(?:src|href)="(?!#)', page), "it needs another file"
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {"0F0", "1B0", "0U", "send"} <= {event["name"] for event in trace}
    parts = json.loads((folder / "breakdown.json").read_text())
    assert parts["mean"]["update_seconds"] > 0
    assert sum(parts["mean"].values()) == pytest.approx(parts["total_seconds"])
    assert "recompute" in result.stdout
    assert load_recipe(folder / "recipe.yaml").training.max_steps == STEPS
    kept = {f"checkpoint-{2 * SAVED}", f"checkpoint-{STEPS}"}
    assert {path.name for path in folder.glob("checkpoint-*")} == kept
    assert not list(folder.glob(".checkpoint*"))


def test_plain_transformers_translates_with_the_result(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    for folder in (finished[0], finished[0] / f"checkpoint-{2 * SAVED}"):
        model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert type(model).__module__.startswith("transformers.")
        assert model.config.vocab_size == len(tokenizer) == 320
        assert model.generation_config.max_new_tokens == 8
        ids = model.generate(**tokenizer(["3. Mai", "4 juin"], return_tensors="pt", padding=True))
        assert ids.shape[0] == 2
        assert ids.shape[1] <= 9
        assert isinstance(tokenizer.batch_decode(ids)[0], str)


@pytest.mark.parametrize("num_stages", [1, 4])
def test_the_loss_does_not_depend_on_the_stages(
    num_stages: int,
    finished: tuple[Path, subprocess.CompletedProcess[str]],
    recipe: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Dropout is on; one process holds all stages."""
    folder = recipe.parent / "out"
    words = [f"pipeline.num_stages={num_stages}", "pipeline.num_processes=1", "pipeline.recompute=none"]
    assert main([str(recipe), *words, "training.save_steps=null", "training.max_steps=20"]) == 0
    assert losses(folder) == pytest.approx(losses(finished[0])[:20], abs=1e-4)
    assert "1 process," in capsys.readouterr().out


def test_the_command_starts_a_process_for_each_replica(recipe: Path, tmp_path: Path) -> None:
    """Dropout is on, and the losses are those of one process, whatever the order of the processes."""
    words = ["training.max_steps=4", "training.save_steps=2", "evaluation.max_examples=1"]
    moved = ["pipeline.placement=2,0 1", "training.max_steps=2"]
    for changed in (moved, []):
        result = forked(recipe, "pipeline.replicas=[2, 1]", *words, *changed, num_processes=3)
        assert result.returncode == 0, result.stderr
        assert "3 processes" in result.stdout
    assert "resuming   from" in result.stdout
    alone = tmp_path / "alone"
    assert main([str(recipe), "pipeline.num_processes=1", f"training.output_dir={alone}", *words]) == 0
    assert losses(recipe.parent / "out") == pytest.approx(losses(alone), abs=1e-6)


def test_a_killed_run_ends_with_the_same_weights(
    finished: tuple[Path, subprocess.CompletedProcess[str]], recipe: Path
) -> None:
    folder = recipe.parent / "out"
    saved = folder / f"checkpoint-{SAVED}"
    kill_once(lambda: losses_so_far(folder) > SAVED + 2 and saved.exists(), recipe)
    assert not (folder / "metrics.json").exists(), "it had ended before it was killed"
    result = forked(recipe)
    assert result.returncode == 0, result.stderr
    assert "resuming   from" in result.stdout
    expected, found = weights(finished[0]), weights(folder)
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
    assert losses(folder) == losses(finished[0])


def kill_once(condition: Callable[[], bool], recipe: Path) -> None:
    """Start the command, and kill all of its processes at once when the condition holds, or one has ended."""
    launcher = forked_command.start(recipe.parent, str(recipe))
    assert launcher.pid is not None
    try:
        wait_until(lambda: condition() or launcher.exitcode is not None, 200)
    finally:
        for process in (*children(launcher.pid), launcher.pid):
            os.kill(process, signal.SIGKILL)
        launcher.join()


def losses_so_far(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


def wait_until(condition: Any, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_a_finished_run_is_only_evaluated(
    finished: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, first = finished
    before = weights(folder)
    words = ["pipeline.num_processes=1", "evaluation.samples=0", "pipeline.num_stages=3"]
    assert main([str(folder.parent / "recipe.yaml"), *words]) == 0
    out = capsys.readouterr().out
    assert f"is finished ({STEPS} steps)" in out
    assert next(line for line in first.stdout.splitlines() if line.startswith("average")) in out
    after = weights(folder)
    assert all(torch.equal(after[name], before[name]) for name in before)


# ---------------------------------------------------------------------- other launchers


def test_another_launcher_s_job_is_joined(recipe: Path, tmp_path: Path) -> None:
    """Tests of faults start torchrun itself, and those of examples `accelerate launch`."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = ["training.max_steps=2", "training.save_steps=null", "evaluation.max_examples=1"]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "2"}
    processes = []
    for rank in "01":
        (tmp_path / rank).mkdir()
        own = {**variables, "RANK": rank, "LOCAL_RANK": rank}
        processes.append(forked_command.start_worker(tmp_path / rank, str(recipe), *words, **own))
    for process in processes:
        process.join(200)
    assert [process.exitcode for process in processes] == [0, 0], (tmp_path / "0/run.err").read_text()
    assert "2 processes" in (tmp_path / "0/run.out").read_text()
    assert len(losses(recipe.parent / "out")) == 2


# ---------------------------------------------------------------------- real text


@pytest.mark.skipif(not TLDR.exists(), reason=f"there is no {TLDR}; HF_GPIPE_TLDR names the file")
def test_real_text_is_learnt(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"""
model:
  config:
    model_type: m2m_100
    d_model: 32
    encoder_layers: 1
    decoder_layers: 1
    encoder_attention_heads: 2
    decoder_attention_heads: 2
    encoder_ffn_dim: 64
    decoder_ffn_dim: 64
    encoder_layerdrop: 0.0
    decoder_layerdrop: 0.0
    max_position_embeddings: 128
data:
  kind: jsonl
  path: {TLDR}
  source_field: src
  target_field: tgt
  language_field: tgt_lang
  languages: [de, es, ko]
  target_tag: true
  max_examples: 1500
  max_source_tokens: 48
  max_target_tokens: 48
tokenizer: {{vocab_size: 1000}}
pipeline:
  {{num_stages: 2, num_micro_batches: 2, num_processes: 1, schedule: gpipe_fused, partition: count, recompute: none}}
training: {{output_dir: {tmp_path / "out"}, max_steps: 70, batch_size: 16, learning_rate: 3.0e-3, save_steps: null}}
evaluation: {{max_examples: 2, max_new_tokens: 8}}
""")
    assert main([str(path)]) == 0
    values = losses(tmp_path / "out")
    assert len(values) == 8
    assert values[-1] < values[0] - 1.5
    assert all(later < earlier + 0.3 for earlier, later in pairwise(values))


def test_a_run_with_a_table_goes_on_from_its_own_recipe(recipe: Path, tmp_path: Path) -> None:
    """The copies of recipe and table in the output directory are enough, whatever became of the table."""
    mine = tmp_path / "mine.txt"
    mine.write_text(build("gpipe_fused", 2, 4, Placement.spread(2, 1)).text())
    short = ["pipeline.num_processes=1", "training.max_steps=2", "training.save_steps=2", "evaluation.max_examples=1"]
    assert main([str(recipe), f"pipeline.schedule={mine}", *short]) == 0
    mine.unlink()
    own = tmp_path / "out" / "recipe.yaml"
    assert load_recipe(own).pipeline.schedule == str(tmp_path / "out" / "schedule.txt")
    assert main([str(own), "training.max_steps=4"]) == 0
    assert len(losses(tmp_path / "out")) == 4


# ---------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.output_dirr=x", "training.output_dirr.*did you mean 'training.output_dir'"),
        ("pipeline.num_stages=two", "pipeline.num_stages: found 'two'"),
        ("pipeline.num_stages=99", "num_stages is 99, but the model has 7 layers"),
        ("pipeline.num_micro_batches=0", "pipeline.num_micro_batches: found 0"),
        ("pipeline.schedule=gpip", "did you mean 'gpipe'"),
        ("pipeline.schedule=nowhere.txt", "there is no file nowhere.txt"),
        ("model.config.model_type=marrian", "no model family 'marrian'; did you mean 'marian'"),
        ("model.config.d_modle=8", "model.config.d_modle.*did you mean 'd_model'"),
        ("model.config.d_model=x", "model.config.*'d_model'"),
        ("model.config.d_model=17", "divisible by num_heads"),
        ("model.config.vocab_size=100", "model.config.vocab_size is 100 and the tokenizer has 320"),
        ("model.config.eos_token_id=7", "model.config.eos_token_id is 7 and the tokenizer's is 1"),
        ("model.path=/nowhere", "model.path: cannot read a model's configuration"),
        ("data={kind: jsonl, path: nowhere.jsonl}", "data.path: there is no file nowhere.jsonl"),
        ("data.languages=[de, xx]", "'xx'"),
        ("data.test_fraction=0", "no test pairs.*data.test_fraction"),
        ("tokenizer.vocab_size=9999", "vocab_size is 9999"),
        ("tokenizer={path: /nowhere}", "no tokenizer that can be read in '/nowhere'"),
        ("training.output_dir=/proc/nowhere", "cannot write into the directory '/proc/nowhere'"),
    ],
)
def test_bad_input_is_one_clear_line(
    override: str, message: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(recipe), override, "pipeline.num_processes=1"]) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(rf"error: .*{message}.*\n", err), err


def test_devices_are_of_a_machine_and_processes_of_all(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The devices of each machine were compared with the processes of all: two machines of two could not train."""
    words = ["pipeline.num_stages=4", "pipeline.num_processes=4", "pipeline.devices=[cpu, cpu]"]
    load_recipe(recipe, words)
    assert main([str(recipe), *words]) == 2
    assert "pipeline.devices ['cpu', 'cpu'] cannot be shared out evenly between 4 processes" in capsys.readouterr().err


def test_a_replica_without_a_micro_batch_is_told_before_any_process_starts(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(recipe), "pipeline.replicas=5"]) == 2
    assert re.fullmatch(r"error: num_micro_batches is 4 and stage 0 has 5 replicas: .*\n", capsys.readouterr().err)
    assert main([str(recipe), "pipeline.replicas=3", "training.batch_size=2"]) == 2
    assert "error: the number of rows of a mini-batch is 2 and stage 0 has 3 replicas: " in capsys.readouterr().err
    assert main([str(recipe), "pipeline.replicas=auto", "pipeline.device=cpu"]) == 2
    assert "error: replicas is auto, and the number of processes that it is chosen for " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pipeline.num_stages=50"], "num_stages is 50, but the model has 7 layers"),
        (
            [
                "pipeline.replicas=9",
                "pipeline.num_micro_batches=9",
                "training.batch_size=9",
                "data={kind: jsonl, path: absent.jsonl}",
            ],
            "there is no file absent.jsonl",
        ),
    ],
)
def test_many_processes_are_not_started_for_an_error(
    words: list[str], message: str, recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_gpipe.job.launch.launch", lambda *_, **__: pytest.fail("processes are started"))
    assert main([str(recipe), *words]) == 2
    assert re.fullmatch(rf"error: .*{message}.*\n", capsys.readouterr().err)


def test_the_users_folders_in_the_output_directory_stay(recipe: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / "out/tokenizer", tmp_path / "out/checkpoints"):
        folder.mkdir(parents=True)
        (folder / "mine.txt").write_text("mine")
    result = forked(recipe, "training.max_steps=1", "pipeline.num_stages=1", num_processes=1)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out/tokenizer/mine.txt").read_text() == "mine"
    assert sorted(path.name for path in (tmp_path / "out/tokenizer").iterdir()) == ["mine.txt"]


def test_a_recipe_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.yaml").write_text("model: [1, 2\ndata: }")
    for name, message in [("missing.yaml", "does not exist"), ("broken.yaml", "line 2")]:
        assert main([str(tmp_path / name)]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert message in err
        assert err.count("\n") == 1


def test_what_only_a_process_of_the_job_finds_is_told_once(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"source": "a", "target": "b"}\n{"source": "a"}\n')
    result = forked(recipe, f"data={{kind: jsonl, path: {tmp_path / 'pairs.jsonl'}}}")
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert "pairs.jsonl, line 2: no field 'target'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_another_training_is_not_resumed(
    finished: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = finished[0].parent / "recipe.yaml"
    assert main([str(path), "training.learning_rate=0.5", "pipeline.num_processes=1"]) == 2
    assert "training.learning_rate is 0.5" in capsys.readouterr().err


def test_never_resuming_starts_anew(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(recipe), "pipeline.num_processes=1", "training.max_steps=2", "training.save_steps=1"]
    assert main(words) == 0
    first = losses(recipe.parent / "out")
    assert main([*words, "training.resume=never", "training.seed=1"]) == 0
    assert "deleted" in capsys.readouterr().out
    assert len(losses(recipe.parent / "out")) == 2
    assert losses(recipe.parent / "out") != first


def test_the_best_model_is_that_of_the_least_validation_loss(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The learning rate is so high that the first checkpoint is the best one."""
    words = [str(recipe), "pipeline.num_processes=1", "training.max_steps=4", "training.learning_rate=0.3"]
    words += ["training.eval_steps=2", "training.save_steps=2", "training.load_best_model_at_end=true"]
    assert main(words) == 0
    out = recipe.parent / "out"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    validation = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    best = min(validation, key=validation.__getitem__)
    assert best < 4
    assert f"the model is that of step {best}, " in capsys.readouterr().out
    assert {path.name for path in out.glob("checkpoint-*")} == {f"checkpoint-{best}", "checkpoint-4"}
    assert same(weights(out), weights(out / f"checkpoint-{best}"))
    assert not same(weights(out), weights(out / "checkpoint-4"))
    assert main([*words, "training.save_steps=3"]) == 2
    error = capsys.readouterr().err
    assert all(words in error for words in ("training.load_best_model_at_end", "eval_steps is 2", "save_steps is 3"))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_that_was_being_replaced_is_resumed_from(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command looked for a checkpoint before it gave back the one that was moved aside."""
    words = [str(recipe), "pipeline.num_processes=1", "training.max_steps=2", "training.save_steps=1"]
    assert main(words) == 0
    out = recipe.parent / "out"
    (out / "checkpoint-2").rename(out / ".checkpoint-2.old-0a1b2c3d")
    assert main(words) == 0
    assert "is finished (2 steps)" in capsys.readouterr().out


def test_a_reader_of_the_help_may_stop_early() -> None:
    """Piped into head, the help ended in a traceback."""
    read, write = os.pipe()
    os.close(read)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "hf_gpipe.train", "--help"],
            cwd=REPOSITORY,
            stdout=write,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (0, b"")


def test_help_is_a_page_and_a_section_has_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for key in ("model.path", "pipeline.num_stages", "key=value", "--help section"):
        assert key in out
    assert len(out.splitlines()) <= 66
    assert main(["--help", "training"]) == 0
    assert "training.resume: " in capsys.readouterr().out
    assert main(["--help", "trainin"]) == 2
    assert "did you mean 'training'" in capsys.readouterr().err
    assert main([]) == 2
