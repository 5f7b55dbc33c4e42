"""Recipes read, overridden, checked, written back and explained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hf_gpipe.errors import RecipeError, UserError
from hf_gpipe.recipe import DataSection, check, load_recipe, load_saved, parse_recipe, recipe_help, section_help
from hf_gpipe.recipe.fields import SECTIONS, all_keys
from hf_gpipe.recipe.help import MAIN_KEYS
from hf_gpipe.settings.pipeline import PipelineConfig

MINIMAL = """\
model:
  config: {model_type: marian}
data:
  kind: cldr
  languages: [de, fr]
training:
  output_dir: outputs/test
"""

SHIPPED = sorted((Path(__file__).parents[2] / "recipes").glob("**/*.yaml"))


def refused(text: str, *overrides: str) -> str:
    """The message with which a recipe is refused."""
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, overrides, source="r.yaml")
    return str(caught.value)


def test_a_file_and_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL + "pipeline:\n  num_stages: 2\ntokenizer:\n", encoding="utf-8")
    recipe = load_recipe(path)
    assert recipe.pipeline.num_stages == 2
    assert recipe.pipeline.not_given == ["num_micro_batches", "schedule", "recompute", "partition"]
    assert recipe.tokenizer.path is None
    assert recipe.data.languages == ["de", "fr"]


def test_a_byte_order_mark_is_no_part_of_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert load_recipe(path) == parse_recipe(MINIMAL)


def test_overrides_win_over_the_file_and_the_last_one_wins() -> None:
    recipe = parse_recipe(
        MINIMAL,
        [
            "pipeline.num_stages=2",
            "pipeline.num_stages=4",
            "pipeline.partition=[1, 2, 2, 1]",
            "model.config.d_model=64",
            "training.learning_rate=2e-3",
            "training.output_dir=a=b",
            "data.languages=[de, no]",
        ],
    )
    assert recipe.pipeline.num_stages == 4
    assert recipe.pipeline.partition == (1, 2, 2, 1)
    assert recipe.model.config == {"model_type": "marian", "d_model": 64}
    assert recipe.training.learning_rate == 0.002
    assert recipe.training.output_dir == "a=b"
    assert recipe.data.languages == ["de", "no"]  # Norwegian, not False


def test_a_whole_number_fits_a_float_and_becomes_one() -> None:
    learning_rate = parse_recipe(MINIMAL, ["training.learning_rate=1"]).training.learning_rate
    assert learning_rate == 1.0
    assert isinstance(learning_rate, float)


def test_a_recipe_cannot_be_changed_in_place() -> None:
    recipe = parse_recipe(MINIMAL)
    for section, name in ((recipe.training, "seed"), (recipe.pipeline, "num_stages"), (recipe, "lora")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, 3)


def test_the_resolved_recipe_reads_back_as_the_same() -> None:
    recipe = parse_recipe(
        MINIMAL, ["data.languages=[no, de]", "training.output_dir='2e-3'", "model.attn_implementation='~'"]
    )
    assert parse_recipe(recipe.to_yaml()) == recipe
    assert "num_micro_batches: null" in recipe.to_yaml()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pipeline.num_stage=2", "pipeline.num_stage is not a key of a recipe; did you mean 'pipeline.num_stages'?"),
        ("model.d_model=8", "a field of the model's configuration stands below model.config: model.config.d_model"),
        ("model.pat=x", "did you mean 'model.path'?"),
        ("num_stages=2", "num_stages is not a key of a recipe; did you mean 'pipeline.num_stages'?"),
        ("training.num_stages=2", "did you mean 'pipeline.num_stages'?"),
        ("trainer.seed=1", "trainer is not a key of a recipe; did you mean 'training'?"),
        ("evaluation.zzz=1", "allowed here: max_examples, batch_size, max_new_tokens, num_beams, split, samples"),
        ("pipeline.num_stages=0", "found 0 (a whole number), expected a whole number of at least 1"),
        ("pipeline.num_micro_batches=0", "pipeline.num_micro_batches: found 0"),
        ("pipeline.num_stages=two", "found 'two' (a string), expected a whole number of at least 1"),
        ("pipeline.num_stages=true", "found true (a boolean), expected a whole number"),
        ("pipeline.num_stages=2.0", "found 2.0 (a number), expected a whole number"),
        ("pipeline.num_stages=", "found nothing (null)"),
        (
            "pipeline.recompute=stages",
            "'none', 'block', 'stage', 'host' or a whole number of at least 1 or null; did you mean 'stage'?",
        ),
        ("pipeline.schedule=gpip", "did you mean 'gpipe'"),
        ("pipeline.schedule=forward_only", "found 'forward_only' (a string), expected 'naive', 'gpipe'"),
        ("pipeline.partition=cout", "did you mean 'count'?"),
        ("pipeline.partition=[1, x]", "'profile', 'auto', a list, each entry a whole number of at least 1 or null"),
        ("data.languages=[de, 3]", "data.languages[1]: found 3 (a whole number), expected a non-empty string"),
        ("pipeline.devices=[cpu, 3]", "pipeline.devices[1]: found 3 (a whole number), expected a non-empty string"),
        ("data.test_fraction=1", "expected a number of at least 0 and below 1"),
        ("data.test_fraction=.nan", "not a finite number"),
        ("training.learning_rate=.inf", "not a finite number"),
        ("training.learning_rate='2e-3'", "found '2e-3' (a string), expected a number"),
        ("training.output_dir=' '", "expected a non-empty string"),
        ("tokenizer.character_coverage=1.5", "expected a number above 0 and at most 1"),
        ("model.config={3: 4}", "expected a mapping with strings for keys"),
        ("model.trust_remote_code=yes", "found 'yes' (a string), expected true or false"),
        ("pipeline=4", "pipeline must be a mapping"),
        ("model.config.model_type.x=3", "model.config.model_type is 'marian' (a string), so it has no key 'x'"),
        ("num_stages", "expected key=value"),
        ("=3", "expected key=value"),
        ("pipeline..num_stages=3", "expected key=value"),
        ("data.languages=[de", "the YAML does not parse"),
    ],
)
def test_a_bad_override_is_refused_with_its_key_and_what_is_allowed(override: str, message: str) -> None:
    refusal = refused(MINIMAL, override)
    assert refusal.startswith(f"override {override!r}")
    assert message in refusal
    assert "\n" not in refusal


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.yaml: a recipe must be a mapping of sections"),
        ("[model]", "found ['model'] (a list)"),
        (MINIMAL + "pipeline: [1]", "r.yaml, line 8: pipeline must be a mapping"),
        (MINIMAL + "pipeline:\n  num_stages: x", "r.yaml, line 9: pipeline.num_stages: found 'x'"),
        (MINIMAL + "pipeline.num_stages: 2", "write 'num_stages' below 'pipeline'"),
        (MINIMAL + "1: 2", "r.yaml, line 8: 1 is not a key of a recipe"),
        (MINIMAL.replace("  output_dir: outputs/test", "  seed: 1"), "r.yaml: training.output_dir is missing"),
        (MINIMAL.replace("  kind: cldr\n", ""), "data.kind is missing and has no default; give it 'cldr'"),
        ("model: {config: {model_type: marian}}", "r.yaml: data.kind is missing"),
    ],
)
def test_a_bad_file_is_refused_with_the_line(text: str, message: str) -> None:
    assert message in refused(text)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.config={}", "model.path and config.model_type are missing; give path"),
        ("model.config.model_type=3", "model.config.model_type is 3"),
        ("data.kind=jsonl", "data.path is missing"),
        ("data.languages=[]", "data.languages is empty; name some, such as [de, fr, es], or set num_languages"),
        ("data.num_languages=102", "data.languages names 2 languages and num_languages is 102; leave one"),
        ("data.min_examples_per_language=5000", "data.min_examples_per_language is 5000"),
        ("data.test_fraction=0.95", "their sum must be below 1"),
        ("pipeline={num_stages: 1, num_processes: 2}", "pipeline.num_processes is 2 and num_stages is 1"),
        ("pipeline={num_stages: 1, replicas: [2, 1]}", "pipeline.replicas [2, 1] has 2 entries for 1 stages"),
        ("pipeline={num_stages: 1, partition: [2, 3]}", "pipeline.partition [2, 3] has 2 entries and num_stages is 1"),
        ("model.quantization=nf4", "lora.r is null, so there would be nothing to train"),
        (
            "model.double_quantization=true",
            "quantization is null; set that to nf4 or fp4, or leave double_quantization out",
        ),
        ("lora.target_modules=[q_proj]", "lora.target_modules is ['q_proj'] (a list) and r is null"),
        (
            "lora={path: there, r: 4}",
            "lora.r is 4 (a whole number) and path is 'there', whose adapters have their own",
        ),
        # Such keys were ignored without a word.
        (
            "tokenizer={path: t, vocab_size: 9000}",
            "tokenizer.vocab_size is 9000 (a whole number) and path is 't', whose",
        ),
        (
            "training={output_dir: o, optim: sgd, adam_beta2: 0.95}",
            "training.adam_beta2 is 0.95 (a number) and optim is",
        ),
        (
            "training={output_dir: o, lr_scheduler_type: constant, warmup_steps: 9}",
            "training.warmup_steps is 9.0 (a number) and lr_scheduler_type is constant, which has no warm-up",
        ),
        ("training={output_dir: o, run_name: mine}", "training.run_name is 'mine' (a string) and report_to is empty"),
        (
            "model.path=outputs/../outputs/test",
            "training.output_dir and model.path are the same directory, 'outputs/..",
        ),
        ("data.rank_seed=0", "data.rank_seed is 0 (a whole number) and power_law_exponent is 0, so all languages"),
        ("distillation={quantization: nf4}", "distillation.quantization is 'nf4' (a string) and teacher is null"),
        (
            "preferences={reference_free: true, precompute_ref_log_probs: true}",
            "preferences.precompute_ref_log_probs is true (a boolean) and reference_free is true, so no reference",
        ),
        ("embeddings={margin: 2}", "embeddings.margin is 2.0 (a number) and loss_type is multiple_negatives, which"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(override: str, message: str) -> None:
    refusal = refused(MINIMAL, override)
    assert refusal.startswith("r.yaml: ")
    assert message in refusal


@pytest.mark.parametrize(
    ("key", "value"),
    [("training.num_train_epochs", 3.0), ("pipeline.device", "auto"), ("pipeline.schedule", None), ("data.seed", 0)],
)
def test_null_takes_a_key_back_to_its_default_and_nothing_is_an_error(key: str, value: object, tmp_path: Path) -> None:
    section, _, name = key.partition(".")
    base, child = tmp_path / "base.yaml", tmp_path / "child.yaml"
    base.write_text(MINIMAL.replace("output_dir: outputs/test", "output_dir: outputs/test\n  num_train_epochs: 7"))
    child.write_text(f"extends: base.yaml\n{section}:\n  {name}: null\n")
    for recipe in (load_recipe(child), load_recipe(base, [f"{key}=null"]), load_recipe(base, [f"{key}=~"])):
        assert getattr(getattr(recipe, section), name) == value
    if value is not None:
        child.write_text(f"extends: base.yaml\n{section}:\n  {name}:\n")
        for file, overrides in ((child, []), (base, [f"{key}="])):
            with pytest.raises(RecipeError, match=rf"{key}: found nothing \(null\), .* its default"):
                load_recipe(file, overrides)


def test_a_number_of_languages_stands_in_for_their_names() -> None:
    data = parse_recipe(MINIMAL, ["data.languages=[]", "data.num_languages=102"]).data
    assert (data.languages, data.num_languages) == ([], 102)
    jsonl = parse_recipe(MINIMAL, ["data.kind=jsonl", "data.path=pairs.jsonl"])
    assert jsonl.data.languages == ["de", "fr"]


JSONL = MINIMAL.replace("kind: cldr", "kind: jsonl\n  path: pairs.jsonl")


def test_a_key_that_the_kind_does_not_use_is_an_error() -> None:
    message = refused(JSONL.replace("training:", "  max_number: 5\ntraining:"))
    assert message == (
        "r.yaml, line 7: data.max_number is 5 (a whole number) and data.kind is jsonl, which does not use it; it is "
        "for cldr: leave it out."
    )
    assert refused(JSONL, "data.subset=x").startswith("override 'data.subset=x': data.subset is 'x' (a string) and")
    text = "model: {config: {model_type: llama}}\ndata: {kind: text, path: a.txt}\ntraining: {output_dir: o}\n"
    assert parse_recipe(text).data.kind == "text"
    for override in ("data.temperature=2", "data.languages=[de]", "data.max_source_tokens=7", "evaluation.samples=2"):
        assert "data.kind is text, which does not use it; it is for cldr, jsonl" in refused(text, override)


def test_whoever_changes_the_kind_drops_what_it_does_not_use() -> None:
    cldr = MINIMAL.replace("training:", "  max_number: 5\n  test_fraction: 0.5\ntraining:")
    data = parse_recipe(cldr, ["data.kind=csv", "data.path=a.csv", "data.delimiter=;"]).data
    assert (data.max_number, data.test_fraction, data.delimiter) == (999, 0.5, ";")
    assert "data.max_number is 6" in refused(cldr, "data.kind=csv", "data.path=a.csv", "data.max_number=6")
    assert "data.max_number is 6" in refused(cldr, "data={kind: csv, path: a.csv, max_number: 6}")


def test_a_recipe_is_written_with_the_keys_of_its_kind_alone() -> None:
    written = parse_recipe(JSONL).to_yaml()
    assert "source_field: source" in written
    assert "max_number" not in written
    assert "max_number: 999" in parse_recipe(MINIMAL).to_yaml()


def test_the_recipe_that_an_earlier_version_wrote_is_read(tmp_path: Path) -> None:
    """It has every key, and of other kinds what its base had."""
    path = tmp_path / "recipe.yaml"
    path.write_text(JSONL.replace("training:", "  max_number: 5\n  templates: []\n  subset: null\ntraining:"))
    assert load_saved(path) == parse_recipe(JSONL)
    with pytest.raises(RecipeError, match="max_number"):
        load_recipe(path)
    path.write_text(f"{JSONL}pipeline:\n  tensor_parallel: 2\n  sequence_parallel: true\n")
    assert load_saved(path).pipeline.division.num_ranks == 2
    with pytest.raises(RecipeError, match=r"pipeline\.sequence_parallel is not a key of a recipe"):
        load_recipe(path)
    path.write_text(JSONL.replace("training:", "training:\n  memory_save_steps: null"))
    assert load_saved(path) == parse_recipe(JSONL)
    with pytest.raises(RecipeError, match=r"memory_save_steps is not a key of a recipe any more: write save_steps"):
        load_recipe(path)


def test_an_old_recipe_of_what_is_gone_is_told_what_to_do(tmp_path: Path) -> None:
    """It would have been told of names that are spelt alike."""
    text = JSONL.replace("kind: jsonl", "kind: process_rewards")
    with pytest.raises(RecipeError, match=r"data.kind is process_rewards: process rewards are gone: .* classification"):
        parse_recipe(text)
    with pytest.raises(RecipeError, match=r"line \d+: data.step_separator is not a key of a recipe any more: process"):
        parse_recipe(text.replace("training:", "  step_separator: x\ntraining:"))
    teacher = f"{JSONL}distillation:\n  top_k_file: null\n"
    with pytest.raises(RecipeError, match=r"distillation.top_k_file is not .* any more: .* distillation.teacher"):
        parse_recipe(teacher)
    path = tmp_path / "recipe.yaml"
    path.write_text(teacher)
    assert load_saved(path) == parse_recipe(JSONL)


def test_an_error_made_in_python_is_as_clear() -> None:
    for wrong, message in (
        ({"num_stages": 0}, "num_stages: found 0 (a whole number), expected a whole number of at least 1"),
        ({"num_stage": 1}, "num_stage is not one of num_stages, "),
        ({"schedule": "gpip"}, "did you mean 'gpipe'"),
        ({"recompute": ["stage", "x"]}, "recompute: found ['stage', 'x'] (a list), expected 'none', 'block'"),
        ({"memory": "80"}, "memory is '80', without a unit"),
    ):
        with pytest.raises(UserError, match=re.escape(message)) as caught:
            PipelineConfig(**wrong)
        assert "pydantic" not in str(caught.value)
        assert "PipelineConfig" not in str(caught.value)
    with pytest.raises(UserError, match="kind is missing"):
        DataSection()  # type: ignore[call-arg]  # what is tested


def test_stages_that_are_not_given_follow_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PipelineConfig().num_stages == 1
    assert PipelineConfig(partition=[1, 2, 3]).num_stages == 3
    assert PipelineConfig(num_processes=2).num_stages == 2
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert PipelineConfig().num_stages == parse_recipe(MINIMAL).pipeline.num_stages == 4
    assert (PipelineConfig(replicas=2).num_stages, PipelineConfig(replicas="auto").num_stages) == (2, 1)
    assert PipelineConfig(3).num_stages == 3
    with pytest.raises(UserError, match=r"recompute \[\] has 0 entries"):
        PipelineConfig(recompute=[])


def test_decided_is_a_type_that_holds_no_auto() -> None:
    config = PipelineConfig(2, "auto", partition=[1, 2])
    assert not config.is_decided
    decided = config.decided(num_micro_batches=4, schedule="1f1b", recompute="none")
    assert decided.is_decided
    assert (decided.num_processes, decided.partition) == (2, (1, 2))
    with pytest.raises(UserError, match="num_micro_batches"):
        config.decided()
    opened = decided.reopened(num_micro_batches="auto", num_processes=None, schedule=None, recompute=None)
    assert opened == config


def test_stages_and_replicas_that_are_left_open() -> None:
    same: Any = {"num_processes": 3, "zero": 1, "memory": ["2GiB"] * 3}
    config = PipelineConfig("auto", 4, "gpipe", "stage", replicas="auto", partition="auto", **same)
    assert config.is_mesh_open
    assert not config.is_decided
    assert (config.processes, config.memory_bytes) == (3, (2 << 30,) * 3)
    decided = config.decided(num_stages=2, replicas=(2, 1), partition=(1, 2))
    assert decided.is_decided
    assert decided.reopened(num_stages="auto", replicas="auto", partition="auto") == config
    config.check_micro_batches(1, rows=1)
    with pytest.raises(UserError, match=r"num_stages is auto, and the number of processes .* give num_processes"):
        config.replace(num_processes=None).processes  # noqa: B018  # what is tested
    for changes, message in (
        ({"replicas": (2, 1)}, "num_stages is auto and replicas is a list"),
        ({"partition": (2, 1)}, "num_stages is auto and partition is a list"),
        ({"placement": "0 1"}, "num_stages is auto, and placement says how many"),
        ({"schedule": "mine.txt"}, "num_stages is auto, and the table says how many"),
        ({"num_processes": 2}, "memory ['2GiB', '2GiB', '2GiB'] has 3 entries and num_processes is 2"),
        (
            {"speeds": (1.0, 0.0, 1.0)},
            "speeds: found (1.0, 0.0, 1.0) (a list), expected a list, each entry a number above 0",
        ),
        ({"memory": ("2GiB", "2", "2GiB")}, "memory is '2', without a unit"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            config.replace(**changes)


def test_a_placement_names_the_processes_of_each_stage() -> None:
    config = PipelineConfig(2, 4, replicas=2, num_processes=4, placement="0,1 2,3")
    assert config.placed("1f1b").workers == ((0, 1), (2, 3))
    assert config.replace(placement=None).placed("1f1b").workers == ((0, 2), (1, 3))
    for changes, message in (
        ({"placement": "0,1 2"}, "has 2 stages with [2, 1] replicas on 3 processes, and num_stages is 2, replicas 2"),
        ({"placement": "0,a 1"}, "placement is '0,a 1'; write the processes of each stage"),
        ({"placement": "0,0 1,2"}, "name at least one, and none twice"),
        ({"schedule": "mine.txt"}, "placement is '0,1 2,3' and mine.txt has a placement; leave it out"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            config.replace(**changes)


def test_check_serves_a_recipe_made_in_python_too() -> None:
    recipe = parse_recipe(MINIMAL)
    with pytest.raises(RecipeError, match=r"data\.max_held_out is 5 .* it is for jsonl, csv"):
        check(recipe.replace(data=recipe.data.replace(max_held_out=5)))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="does not exist"):
        load_recipe(tmp_path / "absent.yaml")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path)
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe("nul\0byte")
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("model: {path: é}".encode("latin-1"))
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe(latin)


def test_help_of_the_sections_names_every_key_with_its_text() -> None:
    for section in SECTIONS:
        text = section_help(section)
        assert max(map(len, text.splitlines())) <= 110
        for name, key in all_keys():
            assert name != section or f"  {name}.{key.name}: " in text
    assert "pipeline.num_stages: a whole number of at least 1 or 'auto'; default: null" in section_help("pipeline")
    assert "training.output_dir: a non-empty string; required" in section_help("training")
    assert "data.max_number: a whole number of at least 1; default: 999; data.kind: cldr\n" in section_help("data")
    assert "default: 1.0; data.kind: cldr, jsonl, csv, parquet,\n      parallel, hub\n" in section_help("data")
    with pytest.raises(UserError, match="'dat' is not a section of a recipe; did you mean 'data'"):
        section_help("dat")


def test_the_main_keys_fit_a_page_with_their_defaults() -> None:
    text = recipe_help()
    for name in MAIN_KEYS:
        assert f"  {name} " in text
    assert "(32) Number of examples in a mini-batch" in text
    assert len(text.splitlines()) < 40
    assert max(map(len, text.splitlines())) <= 120


def test_every_field_has_a_text() -> None:
    assert [f"{name}.{key.name}" for name, key in all_keys() if not key.text] == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_reads_and_reads_back(path: Path) -> None:
    recipe = load_recipe(path)
    assert parse_recipe(recipe.to_yaml()) == recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pipeline.devices=[]"], "pipeline.devices [] is empty"),
        (
            ["pipeline.torch_compile_backend=aot_eager"],
            "pipeline.torch_compile_backend is 'aot_eager' (a string) and torch_compile is false",
        ),
    ],
)
def test_settings_of_devices_and_compilation_that_contradict_each_other(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        load_recipe(Path(__file__).parents[2] / "recipes" / "quickstart.yaml", overrides)


def test_the_number_of_processes_is_that_of_the_workers() -> None:
    assert PipelineConfig(2).processes == 2
    assert PipelineConfig(2, replicas=3).processes == 6
    assert PipelineConfig(3, replicas=(3, 1, 2)).processes == 6
    assert PipelineConfig(4, replicas=2, num_processes=4).processes == 4
    with pytest.raises(UserError, match=r"num_processes is 5 and num_stages is 2.* or more replicas"):
        PipelineConfig(2, replicas=2, num_processes=5)
    with pytest.raises(UserError, match="replicas is 2 and the number of processes is 3"):
        PipelineConfig(2, replicas=2, num_processes=3)
    with pytest.raises(UserError, match=r"replicas \[2, 1\] are on 3 processes, and there are 2"):
        PipelineConfig(2, replicas=(2, 1), num_processes=2)


def test_a_file_cannot_allow_code_to_run(tmp_path: Path) -> None:
    """Recipes are passed on: planning somebody's recipe must not run the code that it names."""
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL.replace("model:\n", "model:\n  trust_remote_code: true\n", 1))
    with pytest.raises(
        RecipeError, match=r"line \d+: model.trust_remote_code is true, .* and a file cannot allow that"
    ):
        load_recipe(path)
    for allowed in ("model.trust_remote_code=true", "model={trust_remote_code: true, config: {model_type: marian}}"):
        assert load_recipe(path, [allowed]).model.trust_remote_code
    assert load_saved(path).model.trust_remote_code, "it is only compared with the recipe of a run that goes on"
    assert not load_recipe(path, ["model.trust_remote_code=false"]).model.trust_remote_code
