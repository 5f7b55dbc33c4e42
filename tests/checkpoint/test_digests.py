"""A damaged checkpoint raises an error: a flipped bit, an exchanged, a missing or a shortened file."""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from hf_gpipe import Pipeline
from hf_gpipe.adapters import StageModel, adapter_for
from hf_gpipe.checkpoint import digests, save, stage_weights
from hf_gpipe.checkpoint.digests import DIGESTS_FILE
from hf_gpipe.checkpoint.directory import check_whole, checkpoints, last_checkpoint, rotate, tidy
from hf_gpipe.checkpoint.state import FOLDER, STATE_FILE
from hf_gpipe.data import train_tokenizer
from hf_gpipe.errors import CheckpointError
from hf_gpipe.job.world import World
from tests.gloo import run_gloo
from tests.oracle import tiny_config
from tests.training.toy import trainer, weights

ALONE = World.current()
SETTINGS = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "dropout": 0.2, "family": "llama"}
SHARD = "model-00002-of-00002.safetensors"
OPTIMIZER = f"{FOLDER}/optimizer-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with the checkpoints 2, 4 and 6, which have every type of file."""
    folder = tmp_path_factory.mktemp("run")
    made = trainer(folder / "out", **SETTINGS)
    made.processing_class = train_tokenizer(["one two three four", "five six seven"] * 4, 279, folder / "tokenizer")
    made.train()
    return folder / "out"


@pytest.fixture
def out(run: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may damage."""
    return Path(shutil.copytree(run, tmp_path / "out"))


def files_of(checkpoint: Path) -> list[str]:
    return sorted(path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())


def flip(file: Path, bit: int | None = None) -> None:
    """Flip one bit, by default in the last byte but one, which in a file of tensors is in the last tensor."""
    content = bytearray(file.read_bytes())
    bit = 8 * (len(content) - 2) if bit is None else bit
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def make_old(checkpoint: Path) -> None:
    """Turn a checkpoint into one of an older version, without digests."""
    (checkpoint / DIGESTS_FILE).unlink()
    state = json.loads((checkpoint / FOLDER / STATE_FILE).read_text())
    del state["progress"]["has_digests"]
    (checkpoint / FOLDER / STATE_FILE).write_text(json.dumps(state))


def forge(checkpoint: Path, name: str, content: str) -> None:
    """Replace a file, and its digest, as somebody does who changes it on purpose."""
    (checkpoint / name).write_text(content)
    digests.write(checkpoint, {}, int(checkpoint.name.rpartition("-")[2]))


def write_digests(checkpoint: Path, **values: Any) -> None:
    """Change what the file of digests says, with a first line that agrees."""
    content = json.loads((checkpoint / DIGESTS_FILE).read_bytes())
    del content["digest"]
    rest = json.dumps(content | values)[1:].encode()
    (checkpoint / DIGESTS_FILE).write_bytes(digests._first_line(rest) + rest)


# ---------------------------------------------------------------------- every kind of damage


def test_the_checkpoint_has_every_kind_of_file(run: Path) -> None:
    checkpoint = run / "checkpoint-6"
    expected = {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        SHARD,
        "tokenizer.json",
        "tokenizer_config.json",
        "trainer_state.json",
        OPTIMIZER,
        f"{FOLDER}/optimizer-00002-of-00002.safetensors",
        f"{FOLDER}/{STATE_FILE}",
        DIGESTS_FILE,
    }
    assert expected <= set(files_of(checkpoint))
    found = digests.Digests.read(checkpoint)
    assert found is not None
    assert found.step == 6
    assert sorted([*found.files, DIGESTS_FILE]) == files_of(checkpoint)
    check_whole(checkpoint, ALONE)


def test_each_of_200_flipped_bits_is_found(out: Path) -> None:
    """In tensors, headers, JSON and the digests themselves; as many in each file."""
    checkpoint, random_bits = out / "checkpoint-6", random.Random(0)
    files = files_of(checkpoint)
    for number in range(200):
        file = checkpoint / files[number % len(files)]
        bit = random_bits.randrange(8 * file.stat().st_size)
        flip(file, bit)
        with pytest.raises(CheckpointError) as caught:
            check_whole(checkpoint, ALONE)
        assert str(file) in str(caught.value), (file, bit)
        flip(file, bit)
    check_whole(checkpoint, ALONE)


def test_every_exchange_with_an_older_checkpoint_is_found(out: Path) -> None:
    """Any choice of files of step 4 among those of step 6, and all of them."""
    checkpoint, older = out / "checkpoint-6", out / "checkpoint-4"
    assert files_of(checkpoint) == files_of(older)
    now = {file: (checkpoint / file).read_bytes() for file in files_of(checkpoint)}
    before = {file: (older / file).read_bytes() for file in now}
    differ = [file for file in now if now[file] != before[file]]
    assert len(differ) == 7, "two shards, two files of the optimizer, two states, and the digests"
    for count in range(1, len(differ) + 1):
        for exchanged in itertools.combinations(differ, count):
            for file in differ:
                (checkpoint / file).write_bytes((before if file in exchanged else now)[file])
            with pytest.raises(CheckpointError, match=r"damaged|holds the checkpoint of step 4"):
                check_whole(checkpoint, ALONE)


def test_missing_and_shortened_files_and_those_of_another_run_are_found(out: Path, tmp_path: Path) -> None:
    checkpoint = out / "checkpoint-6"
    trainer(tmp_path / "other", **SETTINGS | {"seed": 1}).train()
    other = tmp_path / "other" / "checkpoint-6"
    for name in files_of(checkpoint):
        file = checkpoint / name
        content = file.read_bytes()
        contents: list[bytes | None] = [
            None,
            b"",
            content[:7],
            content[: len(content) // 2],
            content[:-1],
            content + b" ",
        ]
        if (other / name).exists() and (other / name).read_bytes() != content:
            contents.append((other / name).read_bytes())
        for damaged in contents:
            file.unlink()
            if damaged is not None:
                file.write_bytes(damaged)
            with pytest.raises(CheckpointError) as caught:
                check_whole(checkpoint, ALONE)
            assert name in str(caught.value) or name == DIGESTS_FILE
            file.write_bytes(content)
    check_whole(checkpoint, ALONE)


# ---------------------------------------------------------------------- resuming


def test_a_training_goes_on_from_the_newest_whole_checkpoint(
    run: Path, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a shard of step 4, the checkpoint of step 6 was resumed from, and the losses were wrong."""
    shutil.copy(out / "checkpoint-4" / SHARD, out / "checkpoint-6" / SHARD)
    flip(out / "checkpoint-4" / OPTIMIZER)
    made = trainer(out, **SETTINGS)
    made.train(resume_from_checkpoint=True)
    passed_over = [record.getMessage() for record in caplog.records if "is used" in record.getMessage()]
    assert len(passed_over) == 2
    assert f"checkpoint-6/{SHARD} is damaged: the tensor 'model." in passed_over[0]
    assert f"checkpoint-4/{OPTIMIZER} is damaged: the tensor 'model." in passed_over[1]
    # From step 2 to the same weights, which are in a whole checkpoint again.
    assert last_checkpoint(out, ALONE) == out / "checkpoint-6"
    for name, tensor in weights_in(run / "checkpoint-6").items():
        assert torch.equal(weights_in(out / "checkpoint-6")[name], tensor), name


def weights_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118  (not a mapping)
    return found


def test_a_training_does_not_begin_anew_where_all_checkpoints_are_damaged(out: Path) -> None:
    for step in (2, 4, 6):
        flip(out / f"checkpoint-{step}" / "trainer_state.json")
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged .*-6/trainer_state.json is dam"):
        trainer(out, **SETTINGS).train(resume_from_checkpoint=True)


def test_a_named_checkpoint_is_taken_or_refused(out: Path, tmp_path: Path) -> None:
    flip(out / "checkpoint-6" / OPTIMIZER)
    with pytest.raises(CheckpointError, match=f"checkpoint-6/{OPTIMIZER} is damaged: the tensor .*another checkpoint"):
        trainer(out, **SETTINGS).train(resume_from_checkpoint=out / "checkpoint-6")
    (out / "checkpoint-4").rename(out / "checkpoint-5")
    with pytest.raises(CheckpointError, match="checkpoint-5 holds the checkpoint of step 4"):
        trainer(out, **SETTINGS).train(resume_from_checkpoint=out / "checkpoint-5")
    (out / "checkpoint-5").rename(out / "the-best")
    assert trainer(tmp_path / "on", **SETTINGS).train(resume_from_checkpoint=out / "the-best").global_step == 6


def test_an_old_checkpoint_is_resumed_from_with_one_line(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (2, 4, 6):
        make_old(out / f"checkpoint-{step}")
    made = trainer(out, **SETTINGS | {"max_steps": 7})
    assert made.train(resume_from_checkpoint=True).global_step == 7
    (line,) = (record.getMessage() for record in caplog.records if "digests" in record.getMessage())
    assert line.startswith(str(out / "checkpoint-6"))


def test_a_checkpoint_that_lost_its_digests_is_not_an_old_one(out: Path) -> None:
    (out / "checkpoint-6" / DIGESTS_FILE).unlink()
    with pytest.raises(CheckpointError, match=f"checkpoint-6/{DIGESTS_FILE} is missing"):
        check_whole(out / "checkpoint-6", ALONE)
    assert last_checkpoint(out, ALONE) == out / "checkpoint-4"


def _resume_together(folder: str) -> tuple[list[tuple[str, str | None]], list[str], Path | None]:
    """The bytes that this process reads, its log, and the checkpoint that it finds."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_gpipe").addHandler(handler)
    read: list[tuple[str, str | None]] = []
    original = digests.Digests.check

    def spy(self: digests.Digests, parts: Any) -> None:
        parts = list(parts)
        read.extend((part.file, part.tensor) for part in parts)
        original(self, parts)

    digests.Digests.check = spy  # type: ignore[method-assign]
    world = World.current()
    check_whole(Path(folder) / "checkpoint-2", world)
    digests.Digests.check = original  # type: ignore[method-assign]
    return read, lines, last_checkpoint(Path(folder), world)


def test_processes_share_the_reading_and_agree(out: Path) -> None:
    """The damage is in the share of one of them."""
    flip(out / "checkpoint-6" / SHARD)
    make_old(out / "checkpoint-4")
    (first, first_lines, found), (second, second_lines, also_found) = run_gloo(_resume_together, 2, str(out))
    assert found == also_found == out / "checkpoint-4"
    whole = digests.Digests.read(out / "checkpoint-2")
    assert whole is not None
    everything = [(part.file, part.tensor) for file in whole.files for part in whole.parts(file)]
    assert sorted(map(str, [*first, *second])) == sorted(map(str, everything)), "each part once"
    assert min(len(first), len(second)) > len(everything) // 4
    assert len(first_lines) == 2, "checkpoint-6 is damaged, checkpoint-4 is old"
    assert second_lines == []


# ---------------------------------------------------------------------- models


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of two stages that was saved alone."""
    Pipeline(tiny_config("llama", tied=False), 2).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json", SHARD])
def test_a_saved_model_is_as_it_was_or_is_refused(file: str, model: Path) -> None:
    Pipeline(model, 2)
    flip(model / file, None if file == SHARD else 8 * (model / file).read_bytes().index(b"\n") + 1)
    with pytest.raises(CheckpointError, match=rf"model/{file} is damaged.*delete {DIGESTS_FILE} to use the files"):
        Pipeline(model, 2)
    shutil.copytree(model, model.parent / "other")
    (model / file).unlink()
    with pytest.raises(CheckpointError, match=file):
        Pipeline(model, 2)


def test_an_edited_configuration_is_used_without_the_digests(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    with pytest.raises(CheckpointError, match=rf"config.json is damaged.*on purpose, delete {DIGESTS_FILE}"):
        Pipeline(model, 2)
    (model / DIGESTS_FILE).unlink()
    assert Pipeline(model, 2).adapter.config.attention_dropout == 0.5


def test_a_stage_checks_only_what_it_reads(model: Path, tmp_path: Path) -> None:
    """One file, in which a tensor of the last stage is damaged."""
    pipe = Pipeline(model, 1)
    pipe.save_pretrained(tmp_path / "one")
    with safe_open(tmp_path / "one" / "model.safetensors", "pt") as tensors:
        last = tensors.get_tensor("lm_head.weight")
    content = (tmp_path / "one" / "model.safetensors").read_bytes()
    flip(tmp_path / "one" / "model.safetensors", 8 * content.index(last.numpy().tobytes()))
    adapter = adapter_for(pipe.adapter.config)
    half = len(adapter.layers) // 2
    stage_weights.load(StageModel(adapter, 0, half), tmp_path / "one", torch.device("cpu"), seed=0)
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged: the tensor 'lm_head.weight'"):
        stage_weights.load(
            StageModel(adapter, half, len(adapter.layers)), tmp_path / "one", torch.device("cpu"), seed=0
        )


def test_weights_that_the_digests_do_not_name_are_refused(model: Path) -> None:
    """An older model.safetensors beside the shards is what transformers would read."""
    plain = AutoModelForCausalLM.from_pretrained(model)
    (model / "README.md").write_text("of the Hub")
    Pipeline(model, 2)
    plain.save_pretrained(model.parent / "plain")
    shutil.copy(model.parent / "plain" / "model.safetensors", model)
    with pytest.raises(CheckpointError, match=rf"model.safetensors is not one of the files that {DIGESTS_FILE} names"):
        Pipeline(model, 2)
    Pipeline(model.parent / "plain", 2)


def test_a_model_that_is_saved_again_is_whole(model: Path) -> None:
    """Saving with other stages over an edited file, a deleted file and damaged digests."""
    for num_stages, spoilt in [(1, "config.json"), (3, "generation_config.json"), (2, DIGESTS_FILE)]:
        pipe = Pipeline(model, num_stages)
        flip(model / spoilt)
        (model / "notes.txt").write_text("not ours")
        pipe.save_pretrained(model)
        found = digests.Digests.read(model)
        assert found is not None
        assert sorted([*found.files, DIGESTS_FILE, "notes.txt"]) == files_of(model)
        assert weights_in(model).keys() == dict(Pipeline(model, 2).named_parameters()).keys()


def test_a_crash_in_a_save_leaves_a_model_that_loads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory has no digests then: its configuration may be new and its weights old."""
    pipe = Pipeline(model, 3)

    def crash(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(save.digests, "entry_of_file", crash)
    with pytest.raises(KeyboardInterrupt):
        pipe.save_pretrained(model)
    Pipeline(model, 2)


def test_the_model_of_a_checkpoint_needs_no_state_of_the_training(out: Path) -> None:
    """An upload of the model leaves the state out and takes the digests along."""
    checkpoint = out / "checkpoint-6"
    shutil.rmtree(checkpoint / FOLDER)
    (checkpoint / "trainer_state.json").unlink()
    Pipeline(checkpoint, 3)
    with pytest.raises(CheckpointError, match="is missing"):
        check_whole(checkpoint, ALONE)
    flip(checkpoint / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer.json is damaged"):
        Pipeline(checkpoint, 3)


def test_the_best_model_is_checked_when_it_is_loaded(tmp_path: Path) -> None:
    made = trainer(tmp_path, **SETTINGS)
    made.train()
    flip(tmp_path / "checkpoint-4" / SHARD)
    before = weights(made)
    with pytest.raises(CheckpointError, match=f"checkpoint-4/{SHARD} is damaged"):
        made.pipe.load_pretrained(tmp_path / "checkpoint-4")
    made.pipe.load_pretrained(tmp_path / "checkpoint-6")
    assert all(torch.equal(weights(made)[name], tensor) for name, tensor in before.items())


# ---------------------------------------------------------------------- names that are taken, links


@pytest.mark.parametrize("kind", ["dangling link", "link to a file", "file"])
def test_a_name_that_is_taken_is_an_error_before_the_training(kind: str, tmp_path: Path) -> None:
    """The error was raised later, when the checkpoint had to be written."""
    taken = tmp_path / "out" / "checkpoint-4"
    taken.parent.mkdir()
    (tmp_path / "notes.txt").touch()
    if kind == "file":
        taken.touch()
    else:
        taken.symlink_to(tmp_path / ("gone" if kind == "dangling link" else "notes.txt"))
    made = trainer(tmp_path / "out", **SETTINGS)
    with pytest.raises(CheckpointError, match=r"checkpoint-4 is a (link to .*|file), and a .*rename or delete it"):
        made.train()
    assert made.state.global_step == 0
    taken.unlink()
    made.train()


def test_of_a_link_to_a_checkpoint_only_the_link_goes(out: Path, tmp_path: Path) -> None:
    """Checkpoints that were moved to another disk; rotation and replacement left links behind."""
    for step in (2, 4, 6):
        (out / f"checkpoint-{step}").rename(tmp_path / f"moved-{step}")
        (out / f"checkpoint-{step}").symlink_to(tmp_path / f"moved-{step}")
    assert last_checkpoint(out, ALONE) == out / "checkpoint-6"
    rotate(out, 2)
    assert checkpoints(out) == [out / "checkpoint-4", out / "checkpoint-6"]
    trainer(out, **SETTINGS | {"save_total_limit": 2}).train(resume_from_checkpoint=out / "checkpoint-4")
    assert not (out / "checkpoint-6").is_symlink()
    assert not list(out.glob(".checkpoint*"))
    for step in (2, 4, 6):
        assert (tmp_path / f"moved-{step}" / DIGESTS_FILE).exists(), "what the links led to is the user's"


def test_leftovers_that_are_links_or_files_go(out: Path, tmp_path: Path) -> None:
    (out / ".checkpoint-8.tmp").touch()
    (out / ".checkpoint-8.old-0a1b2c3d").symlink_to(tmp_path / "gone")
    (out / ".checkpoint-2.gone-0a1b2c3d").symlink_to(tmp_path)
    tidy(out)
    assert not list(out.glob(".checkpoint*"))
    assert tmp_path.exists()


def test_rotation_spares_what_was_just_saved_beside_a_damaged_newer_one(out: Path) -> None:
    """A training that resumed from step 2 saves step 3; only the damaged checkpoint of step 6 would have stayed."""
    for step in (4, 6):
        flip(out / f"checkpoint-{step}" / SHARD)
    settings = SETTINGS | {"save_steps": 3, "max_steps": 4, "save_total_limit": 1}
    trainer(out, **settings).train(resume_from_checkpoint=True)
    assert last_checkpoint(out, ALONE) == out / "checkpoint-4"


# ---------------------------------------------------------------------- files that were changed with their digests


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (f"{FOLDER}/{STATE_FILE}", "[" * 5000, "more than 64 levels"),
        (f"{FOLDER}/{STATE_FILE}", '{"format": 1, "progress": 3}', "damaged: 'optimizer' is missing"),
        ("trainer_state.json", '{"log_history": ' + "[" * 900 + "]" * 900 + "}", "more than 64 levels"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "/etc/passwd"}}',
            "names '/etc/passwd', which is not a file",
        ),
        ("model.safetensors.index.json", '{"weight_map": ' + "9" * 5000 + "}", "a whole number of 5000 digits"),
        ("trainer_state.json", '{"global_step": 6, "log_history": [{"loss": 1}]}', r"'step' is missing in log_history"),
        (
            "trainer_state.json",
            '{"global_step": 6, "log_history": [{"step": 1, "training_seconds": "x"}]}',
            r"log_history\[0\].training_seconds is 'x'",
        ),
        ("trainer_state.json", '{"global_step": "six"}', r"global_step is 'six' \(a string\)"),
        ("trainer_state.json", '{"global_step": 6, "stateful_callbacks": [[1]]}', "stateful_callbacks is"),
        ("trainer_state.json", '{"global_step": 6, "unheard": 1}', "unheard"),
        ("trainer_state.json", '{"global_step": ' + "9" * 5000 + "}", "a whole number of 5000 digits"),
        ("trainer_state.json", "\ud83d{", "not JSON"),
    ],
)
def test_json_that_is_malformed_is_damage_and_the_older_checkpoint_is_used(
    name: str, content: str, message: str, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    forge(out / "checkpoint-6", name, content.encode("utf-8", "surrogatepass").decode("latin-1"))
    with caplog.at_level(logging.WARNING):
        assert last_checkpoint(out, ALONE) == out / "checkpoint-4"
    assert re.search(message, caplog.text)
    assert "the older checkpoint-4 is used" in caplog.text
    with pytest.raises(CheckpointError, match=message):
        check_whole(out / "checkpoint-6", ALONE)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"files": []}, r"files is \[\] \(a list\)"),
        ({"files": {"config.json": 7}}, "files.config.json is 7"),
        ({"files": {"model.safetensors": {"header": "a"}}}, "files.model.safetensors"),
        ({"files": {"../../x": "a"}}, "outside of its directory"),
        ({"files": {"/etc/passwd": "a"}}, "outside of its directory"),
        ({"files": {"a\0b": "a"}}, "outside of its directory"),
        ({"files": {FOLDER: "a"}}, "not a regular file"),
        ({"step": "6"}, "step is '6'"),
        ({"step": {}}, "step is {}"),
        ({"format": []}, r"format \[\]"),
        ({"more": json.loads("[" * 100 + "]" * 100)}, "more than 64 levels"),
    ],
)
def test_digests_of_another_type_are_damage(values: dict[str, Any], message: str, out: Path) -> None:
    write_digests(out / "checkpoint-6", **values)
    with pytest.raises(CheckpointError, match=message):
        check_whole(out / "checkpoint-6", ALONE)
    assert last_checkpoint(out, ALONE) == out / "checkpoint-4"


def test_headers_of_tensors_that_make_no_sense_are_damage(out: Path) -> None:
    file = out / "checkpoint-6" / SHARD
    for header in (b"[]", b"{", b'{"a": 3}', b'{"a": {"data_offsets": [0]}}', b'{"a": {"data_offsets": [9, 1]}}'):
        content = len(header).to_bytes(8, "little") + header
        file.write_bytes(content)
        digests.write(out / "checkpoint-6", {SHARD: {"header": digests.digest(content), "tensors": {}}}, 6)
        with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors.* is damaged"):
            check_whole(out / "checkpoint-6", ALONE)
