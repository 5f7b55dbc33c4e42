"""hf-gpipe plan, on recipes whose models are never made."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from hf_gpipe.commands.plan import _longest, _with_verdict, main
from hf_gpipe.planner import plan
from hf_gpipe.schedule import build

TINY = """\
model:
  config: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 4, num_attention_heads: 4}
data: {kind: cldr, languages: [de], max_source_tokens: 32, max_target_tokens: 32}
tokenizer: {vocab_size: 5000}
pipeline: {num_stages: 2, num_micro_batches: 2, schedule: gpipe, recompute: stage, partition: count}
training: {output_dir: never, batch_size: 4}
"""


@pytest.fixture(autouse=True)
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of these tests are smaller than what CUDA's libraries hold."""
    monkeypatch.setattr(plan, "library_bytes", lambda _, placement, __: [0] * placement.num_processes)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(TINY)
    return str(path)


def joined(text: str) -> str:
    """A text with its lines joined, as before they were wrapped."""
    return re.sub(r"\s+", " ", text)


def chosen_of(text: str) -> list[str]:
    """The overrides after "chosen", which a shell reads."""
    words = text.split("\nchosen ")[1].split("\ntable ")[0].split("\nmore ")[0]
    return shlex.split(words.replace("\\\n", ""))


def test_a_recipe_that_fits(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([recipe, "--memory", "1GiB", "--device", "t4", "--verbose"]) == 0
    out, err = capsys.readouterr()
    assert "vocabulary of 5000 tokens, from tokenizer.vocab_size" in err
    rows = "4 rows of 64 tokens, as 2 micro-batches of at most 2; rows are counted at 64 tokens, the longest"
    for words in ("2 x t4, 1 GiB each", rows, "the slowest is stage"):
        assert words in joined(out)
    assert "verdict     fits: process " in out
    assert not Path("never").exists()


@pytest.mark.parametrize("columns", [80, 120])
def test_a_plan_of_many_stages_can_be_read_in_a_terminal(
    columns: int, recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines had over 300 columns, the verdict came last, and a bubble of 90 % was a number among others."""
    monkeypatch.setenv("COLUMNS", str(columns))
    asked = [recipe, "model.config.num_hidden_layers=22", "--devices", "4x6", "--memory", "1GiB"]
    asked += ["pipeline.schedule=1f1b", "pipeline.num_micro_batches=4", "pipeline.partition=auto"]
    assert main(asked) == 0
    short = capsys.readouterr().out
    assert short.startswith("verdict     fits: process ")
    assert re.search(r"but devices wait for \d\d% of the step: 4 micro-batches are few for 24 ", joined(short))
    assert "for a mini-batch of 4 rows of 64 tokens" in joined(short)
    assert len(short.splitlines()) < 40
    assert main([*asked, "--verbose"]) == 0
    whole = capsys.readouterr().out
    assert "stage 23: model.norm .. lm_head" in joined(whole)
    for text in (short, whole):
        assert max(map(len, text.splitlines())) <= min(columns, 100)
    assert _with_verdict(short) == short, "there is no terminal"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert _with_verdict(short).startswith("\033[1;33mverdict ")
    for text, colour in (("does not fit: x", 31), ("fits: x", 32)):
        assert _with_verdict(f"verdict     {text}\nstep") == f"\033[1;{colour}mverdict     {text}\033[0m\nstep"
    monkeypatch.setenv("NO_COLOR", "1")
    assert _with_verdict(short) == short


def test_a_card_that_drives_a_screen(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan within 0.4 GiB of the whole memory of a card was no plan for the card that also draws a desktop."""
    assert main([recipe, "--device", "rtx3090", "--json", "--screen"]) == 0
    first, second = json.loads(capsys.readouterr().out)["memory_limit_bytes"]
    assert second - first == 1 << 30
    assert main([recipe, "--device", "rtx3090"]) == 0
    assert "screen" not in capsys.readouterr().out
    assert main([recipe, "--device", "rtx3090", "--memory", "512MiB"]) == 0
    assert "if its card drives a screen, plan with --screen" in joined(capsys.readouterr().out)
    assert main([recipe, "--screen"]) == 2
    assert "--screen: no limit of memory is known; give --memory or --device" in capsys.readouterr().err


@pytest.mark.parametrize("most", [2, 200, 256, 1000, 5000])
def test_the_longest_texts_that_fit(most: int) -> None:
    found = re.fullmatch(
        r"data.max_length=(\d+) fits and (\d+) does not, all else equal", _longest("data.max_length", most.__ge__)
    )
    assert found is not None
    fits, does_not = map(int, found.groups())
    assert fits <= most < does_not <= max(fits + 1, 1.02 * fits)


def test_no_length_and_every_length_fits() -> None:
    assert _longest("x", lambda tokens: False) == "no length fits"
    assert "longer ones were not tried" in _longest("x", lambda tokens: True)


def test_one_that_does_not_says_what_would(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([recipe, "--memory", "17MiB", "training.batch_size=16"]) == 1
    out = capsys.readouterr().out
    assert "verdict     does not fit: " in out
    assert re.search(r"num_micro_batches=\d+ fits:\s", out)


def test_a_pretrained_model_that_does_not_fit_is_told_what_adapters_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4, "vocab_size": 64}))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {{path: {tmp_path}}}\n"
        "data: {kind: cldr, languages: [de], max_source_tokens: 8, max_target_tokens: 8}\n"
        "pipeline: {num_stages: 2, num_micro_batches: 2, schedule: gpipe, recompute: stage, partition: count}\n"
        "training: {output_dir: never, batch_size: 4}\n"
    )
    # A block has 4.2 MB of weights, their gradients, and 8.4 MB of AdamW's state.
    assert main([str(path), "--memory", "15MiB"]) == 1
    found = re.search(
        r"no number of stages .*, lora.r=16 fits: ([\d.]+) MiB .*; lora.r=16 model.quantization=nf4 fits: ([\d.]+) MiB",
        joined(capsys.readouterr().out),
    )
    assert found is not None
    adapters, quantised = map(float, found.groups())
    assert quantised < adapters <= 15


def test_json_and_a_picture(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.png"
    assert main([recipe, "--json", "--picture", str(picture), "pipeline.schedule=1f1b"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["settings"]["schedule"] == "1f1b"
    assert [stage["layers"] for stage in plan["stages"]] == [4, 3]
    for stage in plan["stages"]:
        assert stage["memory_bytes"].pop("total") == sum(stage["memory_bytes"].values())
    assert sum(plan["processes"][0]["seconds"].values()) == pytest.approx(plan["step_seconds"])
    assert [process["communicators"] for process in plan["processes"]] == [2, 2], "down and up"
    assert picture.read_bytes().startswith(b"\x89PNG")
    page = tmp_path / "plan.html"
    assert main([recipe, "--picture", str(page), "--memory", "1GiB"]) == 0
    text = page.read_text()
    assert '<p class="good">fits: process ' in text
    assert text.count("<svg") == 1
    assert not re.search(r'(?:src|href)="(?!#)', text), "it needs another file"


def test_auto_values_are_chosen(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    auto = [f"pipeline.{key}=auto" for key in ("num_micro_batches", "schedule", "recompute", "partition")]
    assert main([recipe, "--memory", "1GiB", *auto]) == 0
    chosen = chosen_of(capsys.readouterr().out)
    assert main([recipe, "--memory", "1GiB", *chosen]) == 0
    assert "auto" not in " ".join(chosen)
    assert "chosen" not in capsys.readouterr().out


def test_more_devices_make_more_stages(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([recipe, "--devices", "4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["processes"]) == 4
    assert main([recipe, "--devices", "1", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["stages"]) == 2


def test_a_cluster_says_where_the_replicas_are_and_what_they_send(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    replicas = [recipe, "pipeline.replicas=2", "--device", "t4"]
    assert main([*replicas, "--devices", "2x2"]) == 0
    out = capsys.readouterr().out
    assert "cluster     2x2: 2 at 12.5 GB/s, each of 2 at 12.5 GB/s" in out
    assert "replicas    [2 x 2] of the stages\nprocesses   0,2 1,3, of each stage" in out
    plans = []
    for devices in ("4", "2x2@1MB/s,12.5GB/s+10us", "2x2@12.5GB/s+10us,12.5GB/s+10us"):
        assert main([*replicas, "--devices", devices, "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    alike, slow, same = plans
    assert slow["step_seconds"] > 2 * alike["step_seconds"]
    # Two reductions share the link of a machine.
    assert same["step_seconds"] >= alike["step_seconds"]
    sent = slow["bytes_per_row"]
    assert sent["total"] == sent["gradients"] + sent["boundaries"]
    # Two replicas of each stage send 2 |w| in all, and four of the whole model three times that.
    assert sent["data_parallel"] == pytest.approx(3 * sent["gradients"])
    assert alike["bytes_per_row"] == sent
    assert (alike["cluster"], slow["processes_of_stages"]) == (None, [[0, 2], [1, 3]])


def test_a_search(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([recipe, "--memory", "1GiB", "--search"]) == 0
    out = capsys.readouterr().out
    assert "fastest that fit" in out
    assert "overrides   pipeline.num_stages=" in out
    assert "least memory:" in out


@pytest.mark.parametrize("devices", [("--devices", "2"), ("--device", "rtx4090,rtx3090")])
def test_a_search_says_where_layers_must_be_divided(
    devices: tuple[str, str], recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table of 400,000 tokens, its state and logits do not fit a device, and half of them do."""
    asked = [recipe, "tokenizer.vocab_size=400000", "training.batch_size=2", *devices, "--search"]
    assert main([*asked, "--memory", "520MiB"]) == 0
    out = joined(capsys.readouterr().out)
    assert "where weights stay on their devices, it takes pipeline.tensor_parallel=2 or more to fit them" in out
    assert "pipeline.tensor_parallel=2" in out


def test_a_table_that_is_printed_can_be_run(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["pipeline.num_micro_batches=4", "pipeline.recompute=none"]
    assert main([recipe, "--table", "pipeline.schedule=1f1b", *asked]) == 0
    text, drawing = capsys.readouterr()
    assert text == build("1f1b", 2, 4, recompute="none").text()
    assert "stage 1  " in drawing
    assert "bubble" in drawing
    mine = tmp_path / "mine.txt"
    mine.write_text(text)
    assert main([recipe, "--table", f"pipeline.schedule={mine}", *asked]) == 0
    assert capsys.readouterr().out == text
    plans = []
    for schedule in ("1f1b", mine):
        assert main([recipe, "--json", f"pipeline.schedule={schedule}", *asked]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[1]["settings"].pop("schedule") == str(mine)
    assert plans[0]["settings"].pop("schedule") == "1f1b"
    assert plans[0] == plans[1]


def test_a_table_made_for_a_plan(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of stages that are not equal, within a limit of memory that leaves no room for all graphs."""
    numbers = ("num_stages=3", "num_micro_batches=6", "partition=[3,2,2]")
    asked = [recipe, "training.batch_size=48", *(f"pipeline.{number}" for number in numbers)]
    # No graph would wait on such a host.
    asked += ["--device", "t4", "--memory", "20MiB", "--host-bandwidth", "1MB/s"]
    is_open = [*asked, "pipeline.recompute=auto"]
    seconds = {}
    for schedule in ("1f1b", "gpipe_fused", "gpipe", "zb_h1", "zb_h2", "auto"):
        fits = main([*is_open, f"pipeline.schedule={schedule}", "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        if fits:
            seconds[schedule] = plan["step_seconds"]
    assert plan["settings"]["schedule"] == "auto.txt"
    assert seconds.pop("auto") < 0.995 * min(seconds.values())
    assert main([*is_open, "pipeline.schedule=auto"]) == 0
    out = capsys.readouterr().out
    assert "pipeline.schedule=auto pipeline.recompute=auto pipeline.partition=[3,2,2]" in " ".join(chosen_of(out))
    assert "table       made for this plan" in out
    assert main([*is_open, "pipeline.schedule=auto", "--table"]) == 0
    mine = tmp_path / "mine.txt"
    mine.write_text(capsys.readouterr().out)
    assert main([*asked, f"pipeline.schedule={mine}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] == plan["step_seconds"]


def test_a_split_and_a_fix_for_a_table(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text(build("gpipe_fused", 2, 2).text())
    assert main([recipe, "--memory", "1GiB", f"pipeline.schedule={mine}", "pipeline.partition=auto"]) == 0
    chosen = chosen_of(capsys.readouterr().out)
    assert f"pipeline.schedule={mine}" in chosen
    assert main([recipe, "--memory", "1GiB", *chosen]) == 0
    assert f"schedule {mine}, recompute [stage, none]" in joined(capsys.readouterr().out)
    assert main([recipe, "--memory", "17MiB", f"pipeline.schedule={mine}", "training.batch_size=16"]) == 1
    verdict = capsys.readouterr().out
    assert "does not fit" in verdict
    assert "schedule=1f1b" in verdict


def test_layers_measured_here(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU the memory was that of a CPU's attention, although the plan was for a GPU: only seconds are measured."""
    small = ["model.config.num_hidden_layers=2", "tokenizer.vocab_size=500"]
    plans = []
    for measured in ([], ["--profile"]):
        assert main([recipe, *small, *measured, "--device", "t4", "pipeline.partition=count", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[1]["is_measured"]
    assert plans[0]["peak_bytes"] == plans[1]["peak_bytes"]
    assert main([recipe, *small, "--profile", "pipeline.partition=profile", "--memory", "8GiB", "--verbose"]) == 0
    assert "from measured layers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0"], "--devices is 0; a pipeline needs at least 1"),
        (["--devices", "999999999", "--search"], "--devices is 999999999; a plan is for at most 100000"),
        (["--devices", "4", "pipeline.num_stages=2"], "--devices is 4 and pipeline.num_stages is 2"),
        (["--devices", "many"], "--devices is 'many'; write a number of devices"),
        (["--devices", "2x2@1GB/s", "pipeline.num_stages=4"], "has 2 levels .* and links for 1"),
        (["--devices", "2x3", "pipeline.replicas=4"], "--devices is 6, pipeline.replicas 4 and pipeline.num_stages 2"),
        (["--memory", "80"], "--memory is '80', without a unit; write for example 80GiB"),
        (["--device", "a100-8"], "the device 'a100-8' is unknown; known are p100, .*did you mean 'a100-80'"),
        (["--flops", "3TFLOPS"], "--flops and --bandwidth go together"),
        (["--device", "t4", "--flops", "3TFLOPS"], "exclude each other"),
        (
            ["--memory", "1MiB", "pipeline.partition=flops"],
            "no split of 7 layers into 2 stages fits .* no number of stages",
        ),
        (["pipeline.partition=profile"], "plan with --profile, or use flops"),
        (["--picture", "plan.pdf"], "cannot draw plan.pdf: the picture of a plan is a PNG"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["--table", "--json"], "--table and --json exclude each other"),
        (["pipeline.schedule=nowhere.txt"], "there is no file nowhere.txt"),
        (["pipeline.num_stages=9"], "num_stages is 9, but the model has 7 layers"),
        (
            ["model.config.model_type=olmo2", "model.depth_scaled_feed_forward=true"],
            "for the family 'olmo2' it is not known which weights to scale",
        ),
        (["pipeline.memory=much"], "pipeline.memory is 'much', which is not a size"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    recipe: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([recipe, *arguments]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert re.search(message, errors[0]), errors[0]


def test_help_without_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "--memory" in capsys.readouterr().out


def test_a_layer_that_cannot_run_is_an_error_of_the_model(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ValueError("the heads do not fit")

    monkeypatch.setattr("hf_gpipe.planner.costs.tracing.StageTracer.trace", fail)
    assert main([recipe]) == 2
    message = "error: model: transformers cannot make a llama model of this: the heads do not fit"
    assert message in capsys.readouterr().err
