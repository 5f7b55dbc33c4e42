"""Weights: the same from any split, bit-equal through Hub format, readable by plain transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Emu3Config,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_gpipe import Pipeline
from hf_gpipe.adapters import StageModel, adapter_for
from hf_gpipe.adapters.observation import tiny as observed
from hf_gpipe.checkpoint import save, stage_weights, weight_files
from hf_gpipe.checkpoint.save import written_whole
from hf_gpipe.errors import CheckpointError, UserError
from tests.gloo import run_gloo
from tests.oracle import assert_same, padded_batch, plain_model, run_pipeline, run_plain, tiny_config

FAMILIES = [("llama", True), ("llama", False), ("marian", True), ("marian", False), ("m2m_100", True), ("bart", False)]


def weights(pipe: Pipeline) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in pipe.named_parameters()}


def saved(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def load_plain(directory: Path) -> PreTrainedModel:
    seq2seq = json.loads((directory / "config.json").read_text()).get("is_encoder_decoder", False)
    auto = AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM
    model, info = auto.from_pretrained(directory, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_initial_weights_do_not_depend_on_the_split(family: str, tied: bool) -> None:
    config = tiny_config(family, tied=tied)
    expected = weights(Pipeline(config, 1, seed=3))
    for num_stages in (2, 3, 5):
        assert_equal(weights(Pipeline(config, num_stages, seed=3)), expected)
    other = weights(Pipeline(config, 2, seed=4))
    assert any(not torch.equal(other[name], expected[name]) for name in expected)


def test_initial_weights_follow_the_family_and_leave_the_generator_alone() -> None:
    """Standard deviations, zeros at the padding index and sinusoidal tables are those of transformers."""
    before = torch.get_rng_state()
    found = weights(Pipeline(tiny_config("marian", d_model=32, init_std=0.1), 3))
    assert torch.equal(before, torch.get_rng_state())
    shared = found["model.shared.weight"]
    assert not shared[0].any()
    assert 0.09 < float(shared[1:].std()) < 0.11
    plain = plain_model(tiny_config("marian", d_model=32), dtype=torch.float32)
    table = "model.encoder.embed_positions.weight"
    assert torch.equal(found[table], plain.get_parameter(table))


@pytest.mark.parametrize("is_sharded", [False, True])
def test_tensors_that_the_model_does_not_have(
    is_sharded: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They were ignored without a word, where transformers warns; with a bias the model would be another one."""
    names = ["model.layers.9.mlp.up_proj.weight", "more.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    tensors = {**plain_model(tiny_config("llama")).state_dict(), **{name: torch.zeros(2) for name in names}}

    file = "all.safetensors" if is_sharded else "model.safetensors"

    def write() -> None:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / file, {"format": "pt"})
        if is_sharded:
            index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file)}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    tiny_config("llama").save_pretrained(tmp_path)
    write()
    with caplog.at_level("WARNING"):
        Pipeline(tmp_path, 2)
    (warning,) = [record.message for record in caplog.records if "not read" in record.message]
    assert warning.startswith("2 tensors of the checkpoint")
    assert f"no such parameters: {names[0]}, {names[1]};" in warning
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(8)
    write()
    with pytest.raises(CheckpointError, match=r"q_proj\.bias, which the model's configuration turns off"):
        Pipeline(tmp_path, 2)


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("marian", False), ("bart", False)])
def test_round_trip_is_bit_equal(family: str, tied: bool, tmp_path: Path) -> None:
    """Of other families, and of these tied the other way, in test_round_trips.py."""
    plain = plain_model(tiny_config(family, tied=tied), dtype=torch.float32)
    source = tmp_path / "source"
    plain.save_pretrained(source)
    expected = saved(source)
    for num_stages in (1, 2, 4):
        pipe = Pipeline(source, num_stages)
        pipe.save_pretrained(tmp_path / f"k{num_stages}")
        assert_equal(saved(tmp_path / f"k{num_stages}"), expected)
        assert_equal(dict(load_plain(tmp_path / f"k{num_stages}").state_dict()), dict(plain.state_dict()))


def test_sharded_checkpoints_are_read(tmp_path: Path) -> None:
    plain = plain_model(tiny_config("m2m_100"), dtype=torch.float32)
    plain.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    assert_equal(weights(Pipeline(tmp_path, 3)), expected)


def test_the_text_part_of_a_larger_model_is_read(tmp_path: Path) -> None:
    """Emu3's is saved with a configuration of its own, of which the auto class makes no model."""
    whole = observed.tiny_config(Emu3Config(text_config={"attention_dropout": 0.0}))
    plain = AutoModelForCausalLM.from_config(whole, attn_implementation="eager")
    plain.save_pretrained(tmp_path)
    pipe = Pipeline(tmp_path, 2, 2, dtype="float64", attn_implementation="eager")
    pipe.save_pretrained(tmp_path / "again")
    assert_equal(saved(tmp_path / "again"), saved(tmp_path))
    batch = padded_batch(whole.get_text_config())
    assert_same(run_pipeline(pipe, batch), run_plain(plain.double(), batch, 2))


@pytest.mark.parametrize("size", ["1GB", "10KB"])
def test_the_configuration_names_the_file_of_the_weights(size: str, tmp_path: Path) -> None:
    """The weights of model.safetensors were read in place of those that `transformers_weights` names."""
    config = tiny_config("llama")
    plain_model(config, 1, torch.float32).save_pretrained(tmp_path / "other", max_shard_size=size)
    plain_model(config, 0, torch.float32).save_pretrained(tmp_path)
    for file in (tmp_path / "other").glob("model*"):
        file.rename(tmp_path / file.name.replace("model.", "other."))
    name = next(file.name for file in tmp_path.glob("other.safetensors*"))
    configured(tmp_path, transformers_weights=name)
    assert_equal(weights(Pipeline(tmp_path, 2)), dict(load_plain(tmp_path).named_parameters()))


def test_only_the_needed_shards_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_model(tiny_config("llama", tied=False), dtype=torch.float32)
    plain.save_pretrained(tmp_path, max_shard_size="10KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    fetched: list[str] = []
    cached_file = weight_files.cached_file

    def spy(path: str, name: str, **options: object) -> str | None:
        fetched.append(name)
        return cached_file(path, name, **options)

    monkeypatch.setattr(weight_files, "cached_file", spy)
    for stage in range(3):
        fetched.clear()
        adapter = adapter_for(plain.config)
        model = StageModel(adapter, 2 * stage, 2 * stage + 2)
        stage_weights.load(model, tmp_path, torch.device("cpu"), seed=0)
        model.seal(torch.device("cpu"))
        shards = {name for name in fetched if name.startswith("model-")}
        assert shards == {index[name] for name in model.parameters}
        assert len(shards) < len(set(index.values()))


@pytest.mark.parametrize("case", ["one file", "shards", "an index that says it", "several types"])
def test_the_weights_tell_their_type(case: str, tmp_path: Path) -> None:
    """A checkpoint of bfloat16 whose config.json has no `dtype` was loaded in float32."""
    plain = plain_model(tiny_config("llama"), dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path, max_shard_size="1GB" if case in ("one file", "several types") else "10KB")
    if case == "several types":
        tensors = load_file(tmp_path / "model.safetensors")
        last = max(tensors)
        save_file(tensors | {last: tensors[last].float()}, tmp_path / "model.safetensors", {"format": "pt"})
    if case == "an index that says it":
        file = tmp_path / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        file.write_text(json.dumps(index | {"metadata": index["metadata"] | {"dtype": "float16"}}))
    configured(tmp_path, dtype=None)
    expected = load_plain(tmp_path)
    assert expected.dtype == (torch.float16 if case == "an index that says it" else torch.bfloat16)
    assert_equal(weights(Pipeline(tmp_path, 2)), dict(expected.named_parameters()))


def test_training_does_not_touch_the_files_that_were_loaded(tmp_path: Path) -> None:
    plain_model(tiny_config("llama"), dtype=torch.float32).save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    pipe = Pipeline(tmp_path, 2)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.add_(1.0)
    expected = {name: tensor.clone() for name, tensor in weights(pipe).items()}
    assert (tmp_path / "model.safetensors").read_bytes() == before
    (tmp_path / "model.safetensors").write_bytes(b"overwritten")
    assert_equal(weights(pipe), expected)


def test_tied_names_with_two_different_tensors_stay_apart(tmp_path: Path) -> None:
    """Checkpoints of T5 1.1 are like this: the configuration ties, the files hold two tensors."""
    untied = plain_model(tiny_config("llama", tied=False), dtype=torch.float32)
    untied.config.tie_word_embeddings = True
    untied.save_pretrained(tmp_path)
    expected = saved(tmp_path)
    assert not torch.equal(expected["lm_head.weight"], expected["model.embed_tokens.weight"])
    for num_stages in (1, 3):
        pipe = Pipeline(tmp_path, num_stages)
        assert_equal(weights(pipe), expected)
        pipe.save_pretrained(tmp_path / "again")
        assert_equal(saved(tmp_path / "again"), expected)


def test_a_crash_during_a_save_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Pipeline(tiny_config("llama"), 2, seed=1)
    old.save_pretrained(tmp_path)
    expected = weights(old)
    new = Pipeline(tiny_config("llama"), 3, seed=2)
    for victim in ("save_file", "hand_over"):
        monkeypatch.setattr(save, victim, _crash)
        with pytest.raises(KeyboardInterrupt):
            new.save_pretrained(tmp_path)
        monkeypatch.undo()
        assert_equal(weights(Pipeline(tmp_path, 2)), expected)
    new.save_pretrained(tmp_path)
    assert_equal(weights(Pipeline(tmp_path, 2)), weights(new))


def _crash(*args: object, **options: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("victim", [PreTrainedConfig, GenerationConfig])
def test_a_crash_leaves_no_configuration_cut_short(
    victim: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of the old checkpoint were written over in place."""
    pipe = Pipeline(tiny_config("llama"), 2)
    pipe.save_pretrained(tmp_path)
    names = ("config.json", "generation_config.json")
    before = [(tmp_path / name).read_bytes() for name in names]

    def cut_short(config: object, path: str, *args: object, **options: object) -> None:
        Path(path).write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(victim, "to_json_file", cut_short)
    with pytest.raises(KeyboardInterrupt):
        pipe.save_pretrained(tmp_path)
    monkeypatch.undo()
    assert [(tmp_path / name).read_bytes() for name in names] == before
    pipe.save_pretrained(tmp_path)
    assert not list(tmp_path.glob(".*")), "what the crash left is gone"


def test_a_model_in_memory_shares_its_weights() -> None:
    plain = plain_model(tiny_config("marian"))
    pipe = Pipeline(plain, 3)
    for name, parameter in pipe.named_parameters():
        assert parameter is plain.get_parameter(name)


def test_a_process_holds_only_its_own_layers() -> None:
    pipe = Pipeline(tiny_config("llama"), 3)
    held = [p for p in pipe.models[1].model.parameters() if p.device.type != "meta"]
    assert {id(p) for p in held} == {id(p) for p in pipe.models[1].parameters.values()}


def test_saving_over_an_older_checkpoint_leaves_only_the_new_one(tmp_path: Path) -> None:
    for config, num_stages in [("llama", 3), ("marian", 1), ("llama", 2), ("llama", 2)]:
        pipe = Pipeline(tiny_config(config), num_stages, seed=num_stages)
        (tmp_path / "notes.txt").write_text("kept")
        pipe.save_pretrained(tmp_path)
        assert_equal(saved(tmp_path), weights(pipe) if config == "llama" else saved(tmp_path))
        assert len(list(tmp_path.glob("*.safetensors"))) == num_stages
        load_plain(tmp_path)
    assert (tmp_path / "notes.txt").exists()


def test_what_was_saved_beside_an_older_model_goes_with_it(tmp_path: Path) -> None:
    """A tokenizer and the modules of an earlier run stayed in the directory of another model."""
    pipe = Pipeline(tiny_config("llama"), 2)
    for names in (("tokenizer.json", "1_Pooling/config.json"), ("processor_config.json",), ()):
        save_with(pipe, tmp_path, names)
        (tmp_path / "notes.json").write_text("kept")
        found = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.json")}
        own = {"config.json", "generation_config.json", "hf_gpipe_digests.json", "model.safetensors.index.json"}
        assert found == {*own, "notes.json", *names}
    assert not (tmp_path / "1_Pooling").exists()
    # The model alone is saved beside the tokenizer that belongs to it.
    save_with(pipe, tmp_path, ["tokenizer.json"])
    pipe.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").exists()


def save_with(pipe: Pipeline, folder: Path, names: Sequence[str]) -> None:
    pipe.weights.save(folder, partial(write_empty, names=names))


def write_empty(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")


def test_files_with_similar_names_stay(tmp_path: Path) -> None:
    """Every model*.safetensors was treated as an old shard and deleted."""
    own = ["model_ema.safetensors", "model-ema-of-2.safetensors", "model-00001-of-00002.safetensors.bak"]
    for name in own:
        (tmp_path / name).touch()
    for num_stages in (2, 1, 2):
        Pipeline(tiny_config("llama"), num_stages).save_pretrained(tmp_path)
        # Nothing was there to be kept apart from, so the shards have the names that transformers gives.
        assert len(list(tmp_path.glob("model-0*.safetensors"))) == (num_stages if num_stages > 1 else 0)
        assert all((tmp_path / name).exists() for name in own)


def rounded(directory: Path, dtype: torch.dtype = torch.int8) -> None:
    """Whole numbers in place of weights, or numbers of 8 bits without their scales: such a model was used."""
    tensors = load_file(directory / "model.safetensors")
    save_file({n: (100 * t).to(dtype) for n, t in tensors.items()}, directory / "model.safetensors")


def divided(directory: Path) -> None:
    """transformers 5.23 reads such a file first; the other one was read."""
    (directory / "shard-00000-model-00001-of-00001.safetensors").write_bytes(b"")


def configured(directory: Path, **values: Any) -> None:
    """Change values of a model's configuration."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "model.safetensors").unlink(), "has neither model.safetensors nor"),
        (lambda d: (d / "config.json").unlink(), "configuration"),
        (lambda d: (d / "model.safetensors").write_bytes(b"short"), "does not fit|cannot read"),
        (
            partial(configured, intermediate_size=5),
            r"down_proj.weight has the shape \(\d+, \d+\), the model's \(\d+, 5\)",
        ),
        (rounded, "has the type I8, expected floating-point numbers of 16 bits or more; give the checkpoint before"),
        (partial(rounded, dtype=torch.float8_e4m3fn), "has the type F8_E4M3, .*config.json with its quantization_con"),
        (partial(configured, transformers_weights="../a.safetensors"), "expected a file of the same directory"),
        (partial(configured, transformers_weights="adapter_model.bin"), "adapter_model.bin', expected a file"),
        (partial(configured, transformers_weights="b.safetensors"), "has no b.safetensors, which transformers_weig"),
        (divided, "is of a distributed checkpoint of transformers"),
        (partial(configured, hidden_act="gelo"), "no model of the configuration of llama: KeyError: 'gelo'; correct"),
    ],
)
def test_a_damaged_checkpoint_is_refused(damage, message: str, tmp_path: Path) -> None:
    plain_model(tiny_config("llama"), dtype=torch.float32).save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        Pipeline(tmp_path, 2)


def test_a_checkpoint_without_a_parameter_is_refused(tmp_path: Path) -> None:
    """transformers would initialise the missing tensor at random; that must not happen silently."""
    plain = plain_model(tiny_config("llama", tied=False), dtype=torch.float32)
    state = {name: t for name, t in plain.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    plain.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(CheckpointError, match=r"lacks 1 parameters of the model: model.layers.1.mlp.up_proj.weight"):
        Pipeline(tmp_path, 3)


def test_an_index_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    plain = plain_model(tiny_config("llama"), dtype=torch.float32)
    plain.save_pretrained(tmp_path, max_shard_size="10KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = next(iter(content["weight_map"]))
    content["weight_map"][name] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="not a file of the same directory"):
        Pipeline(tmp_path, 2)


def _save_on_two_processes(directory: str) -> dict[str, torch.Tensor]:
    pipe = Pipeline(tiny_config("marian"), 3, seed=5)
    pipe.save_pretrained(directory)
    return weights(pipe)


def test_two_processes_save_one_checkpoint(tmp_path: Path) -> None:
    parts = run_gloo(_save_on_two_processes, 2, str(tmp_path))
    assert not parts[0].keys() & parts[1].keys()
    loaded = load_plain(tmp_path)
    for name, tensor in {**parts[0], **parts[1]}.items():
        assert torch.equal(loaded.get_parameter(name), tensor)


def _fail_then_save(blocked: str, directory: str) -> list[str]:
    pipe = Pipeline(tiny_config("llama"), 2)
    told = []
    with pytest.raises(CheckpointError) as error:
        pipe.save_pretrained(blocked)
    told.append(str(error.value))
    with pytest.raises(CheckpointError) as error, written_whole(Path(blocked) / "checkpoint-1", pipe.world):
        pass
    told.append(str(error.value))
    with pytest.raises(CheckpointError) as error:
        pipe.weights.writer().prepare(Path(blocked), has_model=True)
    told.append(str(error.value))
    pipe.save_pretrained(directory)
    return told


def test_every_process_learns_that_a_directory_cannot_be_written(tmp_path: Path) -> None:
    """Only the main process raised, and the others waited for it in the next exchange."""
    (tmp_path / "file").touch()
    first, second = run_gloo(_fail_then_save, 2, str(tmp_path / "file"), str(tmp_path / "model"))
    assert first == second
    assert all("cannot write into the directory" in text for text in first)
    load_plain(tmp_path / "model")
