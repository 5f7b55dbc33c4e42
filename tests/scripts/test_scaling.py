"""scripts/scaling.py: which runs it starts, what it says of their numbers, and the whole of it on tiny models."""

from __future__ import annotations

import csv
import fcntl
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scaling
from sacrebleu import metrics as library
from translation_scaling import execute as executing
from translation_scaling.differences import (
    LOW_HIGH,
    Difference,
    Interval,
    bootstrap_means,
    compare,
    contrast,
    per_language,
    percentiles,
    score,
    sums_of,
)
from translation_scaling.draw import smoothed
from translation_scaling.learning import Size
from translation_scaling.results import BASELINE, CHRF, NLL, Measure, Results, finished_runs, with_baselines
from translation_scaling.roles import Roles
from translation_scaling.runs import Run, plan_runs, starts, wall_seconds

from hf_gpipe.errors import DataError, UserError
from hf_gpipe.recipe import load_recipe
from tests.forked_command import Program, Training

ROOT = Path(__file__).parents[2]
MODELS = ("laptop-base", "laptop-deep", "laptop-wide")
ROLES = Roles(*MODELS)
NUM_LANGUAGES = 30
BUCKET = [("high", "middle", "low")[place * 3 // NUM_LANGUAGES] for place in range(NUM_LANGUAGES)]

RECIPE = """
model: {config: {model_type: marian, d_model: 16, encoder_layers: 1, decoder_layers: 1, encoder_ffn_dim: 16,
                 decoder_ffn_dim: 16, encoder_attention_heads: 2, decoder_attention_heads: 2,
                 max_position_embeddings: 64}}
data: {kind: cldr, languages: [de, fr, es, it, nl, sv], templates: [weekday, month_day], examples_per_language: 100,
       min_examples_per_language: 50, power_law_exponent: 0.5, test_fraction: 0.1, validation_fraction: 0.02}
tokenizer: {vocab_size: 330}
pipeline: {num_stages: 1, num_micro_batches: 1, device: cpu, schedule: gpipe, partition: count, recompute: none}
training: {output_dir: none, max_steps: 1, batch_size: 8, logging_steps: 1, save_steps: 1}
evaluation: {max_examples: 4, max_new_tokens: 4, samples: 1}
"""


# ---------------------------------------------------------------------- synthetic runs

Score = Callable[[int, int], tuple[float, float]]
"""(place of the language, seed) -> NLL per character and chrF."""


def write_run(output: Path, model: str, seed: int, score: Score, num_languages: int = NUM_LANGUAGES) -> Path:
    """What a finished run leaves behind."""
    folder = output / model / f"seed-{seed}"
    folder.mkdir(parents=True)
    languages = {}
    for place in range(num_languages):
        nll, chrf = score(place, seed)
        languages[f"l{place:02}"] = {
            "num_pairs": 10,
            "nll": 2 * nll,
            "nll_per_character": nll,
            "exact_match": 0.5,
            "bleu": 20.0,
            "chrf": chrf,
            "exact_match_copy": 0.0,
            "bleu_copy": 5.0,
            "chrf_copy": 20.0,
            "training_pairs": 1000 - 10 * place,
            "bucket": BUCKET[place],
        }
    cost = {
        "num_steps": 100,
        "training_seconds": 50.0,
        "tokens_per_second": 1000.0 if model.endswith("wide") else 500.0,
        "seconds_per_step": 0.5,
        "step_seconds": 0.45,
        "bubble": 0.2,
        "resumed_from_step": 0,
        "wall_seconds": 70.0,
        "peak_bytes": [300 << 20, 400 << 20],
        "num_parameters": 1_000_000,
        "num_stages": 2,
        "num_processes": 2,
        "num_micro_batches": 8,
        "schedule": "gpipe",
        "recompute": "stage",
        "device": "cpu",
        "predicted": {"step_seconds": 0.4, "bubble": 0.1, "peak_bytes": [100 << 20, 200 << 20]},
    }
    mean = {key: float(np.mean([one[key] for one in languages.values()])) for key in ("nll_per_character", "chrf")}
    metrics = {**mean, "chrf_copy": 20.0, "per_language": languages, "cost": cost}
    # The command writes what is no number as null.
    (folder / "metrics.json").write_text(json.dumps(metrics).replace("NaN", "null"))
    path = output / f"{model}.yaml"
    path.write_text(RECIPE)
    run = Run(path, seed, (), output)
    (folder / "recipe.yaml").write_text(run.resolved().to_yaml())
    return folder


def noise(place: int, seed: int, model: int) -> float:
    return float(np.random.default_rng([place, seed, model]).normal())


@dataclass
class World:
    """How much better each model is, by bucket, in chrF; a hundredth of it is the gain in NLL per character."""

    deep: dict[str, float]
    wide: dict[str, float]
    spread: float = 1.0

    def score(self, model: int, place: int, seed: int) -> tuple[float, float]:
        gain = (0.0, self.deep[BUCKET[place]], self.wide[BUCKET[place]])[model]
        gain += self.spread * noise(place, seed, model)
        # Languages differ far more than models do.
        return 3.0 - 0.05 * place - gain / 100, 40.0 + place + gain


def results_of(output: Path, world: World, seeds: tuple[int, ...] = (1, 2)) -> Results:
    for number, model in enumerate(MODELS):
        for seed in seeds:
            write_run(output, model, seed, lambda place, seed, number=number: world.score(number, place, seed))
    return Results.of_runs(finished_runs(output, MODELS, None))


def same(gain: float) -> dict[str, float]:
    return dict.fromkeys(("high", "middle", "low"), gain)


# ---------------------------------------------------------------------- the bootstrap


def test_the_scores_of_resampled_pairs_are_those_of_the_library() -> None:
    """With each pair once, and with some of them several times."""
    texts = [
        ("the open file", "open the file"),
        ("a", "a window"),
        ("", "x"),
        ("print (all)", "print all"),
        ("so", "so"),
    ]
    rows = [
        {"translation": one, "target": other, "nll": float(n), "num_characters": len(other)}
        for n, (one, other) in enumerate(texts)
    ]
    for weights in ([1, 1, 1, 1, 1], [2, 0, 1, 3, 0], [0, 0, 0, 0, 1], [0, 0, 1, 0, 0]):
        taken = [pair for pair, count in zip(texts, weights, strict=True) for _ in range(count)]
        translations, targets = zip(*taken, strict=True)
        expected = library.CHRF().corpus_score(list(translations), [list(targets)]).score
        assert score(weights @ sums_of(rows, CHRF), CHRF) == pytest.approx(expected)
        nll = sum(row["nll"] * count for row, count in zip(rows, weights, strict=True))
        assert score(weights @ sums_of(rows, NLL), NLL) == pytest.approx(nll / sum(map(len, targets)))


def with_pairs(results: Results, noise: float) -> Results:
    """The same results with twenty pairs a language of the same English sentences, whose scores spread."""
    generator = np.random.default_rng(0)
    spread = {model: noise * generator.normal(size=20) for model in results.models}
    texts: dict[tuple[str, int], list[dict[str, Any]]] = {key: [] for key in results.keys}
    for row in results.rows.itertuples():
        texts[row.recipe, row.seed] += [
            {"language": row.language, "source": "x", "target": f"the sentence {number}", "translation": "the"}
            | {"nll": 10 * (row.nll_per_character + spread[row.recipe][number]), "num_characters": 10}
            for number in range(20)
        ]
    return Results.of(results.rows, texts)


def test_sentences_that_recur_in_all_languages_widen_the_interval(tmp_path: Path) -> None:
    """Thirty languages say little more than one where all have the same few sentences."""
    results = results_of(tmp_path, World(same(5.0), same(2.0), spread=0.0))

    def width(of: Results) -> float:
        interval = compare(of, "laptop-deep", "laptop-wide", NLL).interval
        assert interval is not None
        return interval.high - interval.low

    assert width(results) == pytest.approx(0.0, abs=1e-9), "the same difference in each language"
    assert width(with_pairs(results, 0.0)) == pytest.approx(0.0, abs=1e-9)
    # Two models' scores spread over 20 sentences, which are the same in all languages.
    assert width(with_pairs(results, 0.1)) == pytest.approx(2 * 1.96 * 0.1 * (2 / 20) ** 0.5, rel=0.5)


def test_the_interval_covers_the_true_mean_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for trial in range(400):
        found = percentiles(bootstrap_means(generator.normal(0.3, 1.0, 34), resamples=800, seed=trial))
        hits += found.low <= 0.3 <= found.high
    # A percentile interval of 34 values is a little too short: about 94 % in theory; 3 standard errors are 3.5 %.
    assert 0.90 <= hits / 400 <= 0.98


def test_resampled_means_have_the_mean_and_the_error_of_the_sample() -> None:
    values = np.random.default_rng(1).normal(2.0, 3.0, 100)
    means = bootstrap_means(values)
    assert means.shape == (10_000,)
    assert means.mean() == pytest.approx(values.mean(), abs=0.02)
    assert means.std() == pytest.approx(values.std() / 10, rel=0.03)
    assert (means == bootstrap_means(values)).all(), "the seed decides"


def test_differences_are_paired_over_languages(tmp_path: Path) -> None:
    """Languages differ by 30 points of chrF, the models by 2 in each: unpaired, no interval would show it."""
    results = results_of(tmp_path, World(same(2.0), same(0.0), spread=0.0))
    found = compare(results, "laptop-deep", "laptop-base", CHRF)
    assert found.mean == pytest.approx(2.0)
    assert found.interval == Interval(pytest.approx(2.0), pytest.approx(2.0))
    assert found.per_seed == {1: pytest.approx(2.0), 2: pytest.approx(2.0)}
    assert found.num_better == found.num_languages == NUM_LANGUAGES


def test_seeds_are_averaged_before_languages_are_compared(tmp_path: Path) -> None:
    for model, gains in (("laptop-base", {1: 0.0, 2: 0.0}), ("laptop-deep", {1: 3.0, 2: -1.0})):
        for seed, gain in gains.items():
            write_run(tmp_path, model, seed, lambda place, _, gain=gain: (1.0 - gain / 100, 40.0 + gain))
    results = Results.of_runs(finished_runs(tmp_path, None, None))
    found = compare(results, "laptop-deep", "laptop-base", CHRF, "low")
    assert found.mean == pytest.approx(1.0)
    assert found.per_seed == {1: pytest.approx(3.0), 2: pytest.approx(-1.0)}
    assert found.num_languages == 10
    assert per_language(results, "laptop-deep", "laptop-base", NLL) == pytest.approx(np.full(30, -0.01))


# ---------------------------------------------------------------------- what is said of the numbers


@pytest.mark.parametrize("measure", [NLL, CHRF])
@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (3.0, "laptop-deep is better than laptop-wide"),
        (-3.0, "laptop-deep is worse than laptop-wide"),
        (0.0, "no difference between laptop-deep and laptop-wide is shown"),
    ],
)
def test_an_outcome_is_what_its_interval_says(tmp_path: Path, measure: Measure, gain: float, words: str) -> None:
    results = results_of(tmp_path, World(same(gain), same(0.0)))
    assert compare(results, "laptop-deep", "laptop-wide", measure, "low").outcome == words


def test_few_languages_have_no_interval(tmp_path: Path) -> None:
    for model, gain in (("laptop-deep", 5.0), ("laptop-wide", 0.0)):
        write_run(tmp_path, model, 1, lambda place, _, gain=gain: (1.0, 40.0 + gain), num_languages=4)
    found = compare(Results.of_runs(finished_runs(tmp_path, None, None)), "laptop-deep", "laptop-wide", CHRF)
    assert found.interval is None
    assert found.outcome == "4 languages are too few for an interval"


@pytest.mark.parametrize(("low", "high", "word"), [(9.0, 4.0, "more"), (-5.0, 4.0, "less")])
def test_a_contrast_compares_buckets(tmp_path: Path, low: float, high: float, word: str) -> None:
    world = World(deep={"high": high, "middle": 0.0, "low": low}, wide=same(0.0), spread=0.3)
    results = results_of(tmp_path, world)
    for measure, scale in ((CHRF, 1.0), (NLL, -0.01)):
        found = contrast(results, "laptop-deep", "laptop-wide", measure)
        assert found is not None
        assert found.bucket == LOW_HIGH
        assert found.mean == pytest.approx(scale * (low - high), abs=0.5 * abs(scale))
        assert found.interval is not None
        assert found.interval.low < found.mean < found.interval.high
        assert found.outcome == f"laptop-deep gains {word} on low-resource languages"
    assert replace(found, interval=Interval(-1.0, 3.0)).outcome.startswith("no difference between")


def test_smoothing_keeps_a_level_and_averages_noise() -> None:
    assert smoothed(np.full(20, 3.0), 2.0) == pytest.approx(np.full(20, 3.0))
    noisy = np.random.default_rng(0).normal(size=100)
    assert smoothed(noisy, 6.0).std() < noisy.std() / 2


# ---------------------------------------------------------------------- roles and sizes


def test_roles_come_from_names() -> None:
    assert Roles.of(MODELS) == ROLES
    assert ROLES.pairs == (
        ("laptop-deep", "laptop-base"),
        ("laptop-wide", "laptop-base"),
        ("laptop-deep", "laptop-wide"),
    )
    assert Roles.of(("one", "two")) == Roles(None, None, None)
    assert Roles.of(("x_base", "a-deep", "b-deep")) == Roles("x_base", None, None)


def test_a_recipe_s_model_is_counted(tmp_path: Path) -> None:
    """With d = 1024 an encoder layer has 4 d 64A + 2 d H weights, a decoder layer another 4 d 64A."""
    path = tmp_path / "paper.yaml"
    path.write_text(
        "model: {transformer: 'T(6,8192,16)', config: {model_type: t5, d_model: 1024, vocab_size: 64000}}\n"
        "data: {kind: cldr, languages: [de]}\ntraining: {output_dir: out}\n"
    )
    found = Size.of(load_recipe(path))
    assert found.body == 6 * (3 * 4 * 1024 * 64 * 16 + 2 * 2 * 1024 * 8192)
    assert found.table == 64000 * 1024
    assert found.total > found.body + found.table


# ---------------------------------------------------------------------- the runs


def runs_of(tmp_path: Path, seeds: tuple[int, ...] = (1, 2)) -> list[Run]:
    paths = [tmp_path / f"{name}.yaml" for name in ("a", "b")]
    for path in paths:
        path.write_text(RECIPE)
    return plan_runs(paths, seeds, ["training.batch_size=4"], tmp_path / "out")


def test_a_seed_of_all_recipes_comes_first(tmp_path: Path) -> None:
    runs = runs_of(tmp_path)
    assert [run.title for run in runs] == ["a, seed 1", "b, seed 1", "a, seed 2", "b, seed 2"]
    resolved = runs[3].resolved()
    assert (resolved.training.seed, resolved.training.batch_size, resolved.data.seed) == (2, 4, 0)
    assert Path(resolved.training.output_dir) == tmp_path / "out" / "b" / "seed-2"


@pytest.mark.parametrize(
    ("names", "seeds", "override", "message"),
    [
        (["a.yaml", "sub/a.yaml"], [1], "", "a name of their own"),
        (["a.yaml"], [1, 1], "", "give each seed once"),
        (["a.yaml"], [1], "training.seed=3", "use --seeds"),
        (["a.yaml"], [1], "training.output_dir=x", "use --output"),
        (["a.yaml"], [1], "training.max_stepz=3", "max_steps"),
        (["a.yaml"], [1], "data={kind: text, path: a.txt}", "data.kind is text, and translations are compared"),
        (["missing.yaml"], [1], "", "does not exist"),
    ],
)
def test_what_cannot_be_run_is_said_first(
    tmp_path: Path, names: list[str], seeds: list[int], override: str, message: str
) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a.yaml", "sub/a.yaml"):
        (tmp_path / name).write_text(RECIPE)
    with pytest.raises(UserError, match=message):
        plan_runs([tmp_path / name for name in names], seeds, [override] if override else [], tmp_path / "out")


def test_progress_is_read_from_what_a_run_left(tmp_path: Path) -> None:
    run = runs_of(tmp_path)[0]
    assert run.progress() == ("new", "")
    run.folder.mkdir(parents=True)
    (run.folder / "recipe.yaml").write_text(run.resolved().to_yaml())
    assert run.progress() == ("begun", "no checkpoint yet")
    for step in (50, 100):
        (run.folder / f"checkpoint-{step}").mkdir()
    assert run.progress() == ("begun", "resumes from step 100")
    (run.folder / "metrics.json").write_text("{}")
    assert run.progress() == ("finished", "")
    other = Run(run.recipe, run.seed, ("training.batch_size=16", "model.config.d_model=32"), run.output)
    progress, detail = other.progress()
    assert progress == "other"
    assert detail.endswith("differs in model.config.d_model, training.batch_size")
    written = Run(run.recipe, run.seed, ("training.batch_size=4", "model.config.dropout=0.5"), run.output)
    (run.folder / "recipe.yaml").write_text(written.resolved().to_yaml())
    assert run.progress()[1].endswith("differs in model.config.dropout"), "a key that the recipe has no more"


#: In place of the training command: it writes what a run leaves, or does what its seed says.
FAKE = """
import json, signal, sys, time
from pathlib import Path
from hf_gpipe.recipe import load_recipe
recipe = load_recipe(sys.argv[1], sys.argv[2:])
folder = Path(recipe.training.output_dir)
with open(folder.parents[1] / "calls", "a") as calls:
    calls.write(f"{folder.parent.name} {recipe.training.seed}\\n")
if folder.parent.name == "b" and not (folder.parents[1] / "repaired").exists():
    print("step 1\\nerror: the disk is full")
    sys.exit(1)
(folder / "recipe.yaml").write_text(recipe.to_yaml())
while (folder.parents[1] / "together").exists() and len((folder.parents[1] / "calls").read_text().splitlines()) < 2:
    time.sleep(0.02)
if (folder.parents[1] / "late").exists():
    time.sleep(2)
if (folder.parents[1] / "slow").exists():
    signal.signal(signal.SIGINT, lambda *_: sys.exit(75))
    (folder.parents[1] / "ready").touch()
    time.sleep(60)
(folder / "metrics.json").write_text(json.dumps({"nll_per_character": 0.5, "chrf": 50.0, "chrf_copy": 20.0}))
"""


@pytest.fixture
def fake_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "fake.py"
    path.write_text(FAKE)
    monkeypatch.setattr(executing, "TRAIN", (sys.executable, str(path)))
    return tmp_path / "out"


def calls(output: Path) -> list[str]:
    return (output / "calls").read_text().splitlines()


def test_a_failure_ends_the_command_and_what_is_finished_is_skipped(
    tmp_path: Path, fake_training: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = runs_of(tmp_path)
    assert executing.execute(runs) == 1
    shown = capsys.readouterr()
    assert calls(fake_training) == ["a 1", "b 1"], "nothing is started after a failure"
    assert "NLL per character 0.5000, chrF 50.0 (copy 20.0)" in shown.out
    assert "b, seed 1 failed" in shown.err
    assert "error: the disk is full" in shown.err
    (fake_training / "repaired").touch()
    assert executing.execute(runs) == 0
    assert calls(fake_training)[2:] == ["b 1", "a 2", "b 2"], "a 1 is finished"
    assert "a, seed 1: finished already" in capsys.readouterr().out
    # Each start is remembered, the failed one too.
    assert [one["exit_code"] for one in starts(runs[1].folder)] == [1, 0]
    with (runs[1].folder / "starts.jsonl").open("a") as file:
        file.write('{"seconds": 1000.0, "exit_code": 2}\n')
    assert 0 < wall_seconds(runs[1].folder) < 1000, "a start that was refused trained nothing"


def test_two_runs_are_trained_at_a_time_and_a_sweep_before_what_needs_it(
    tmp_path: Path, fake_training: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_training.mkdir()
    (fake_training / "repaired").touch()
    (fake_training / "together").touch()
    runs = runs_of(tmp_path)
    needing = replace(runs[0], label="c", sweep=(runs[1], runs[3]))
    assert executing.execute([runs[0], needing, runs[1], runs[3]], at_once=2) == 0
    assert set(calls(fake_training)[:2]) == {"a 1", "b 1"}, "each waits for the other"
    assert calls(fake_training)[2:] == ["b 2", "c 1"]
    out = capsys.readouterr().out.splitlines()
    assert sum("log " in line for line in out) == sum("chrF 50.0" in line for line in out) == 4


def test_no_run_begins_after_a_failure_and_those_under_way_go_on(tmp_path: Path, fake_training: Path) -> None:
    fake_training.mkdir()
    (fake_training / "together").touch()
    (fake_training / "late").touch()
    runs = runs_of(tmp_path)
    assert executing.execute(runs, at_once=2) == 1, "b fails at once, and a is trained meanwhile"
    assert sorted(calls(fake_training)) == ["a 1", "b 1"]
    assert (runs[0].folder / "metrics.json").exists()


def test_a_run_that_goes_on_elsewhere_is_not_started_twice(tmp_path: Path, fake_training: Path) -> None:
    """A script that is killed leaves its run behind; the next one must not train into the same folder."""
    runs = runs_of(tmp_path)
    runs[0].folder.mkdir(parents=True)
    with (runs[0].folder / "run.log").open("a") as log:
        # The process holds the log that it writes to, with no script above it.
        fcntl.flock(log, fcntl.LOCK_EX)
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=log)
    try:
        with pytest.raises(UserError, match="a, seed 1 is being trained already"):
            executing.execute(runs[:1])
    finally:
        child.communicate(b"\n")
    assert executing.execute(runs[:1]) == 0


def test_sigint_reaches_the_run_and_leaves_the_rest_for_later(tmp_path: Path, fake_training: Path) -> None:
    fake_training.mkdir()
    (fake_training / "slow").touch()
    (fake_training / "repaired").touch()
    runs = runs_of(tmp_path)
    text = (
        "import signal, sys; sys.path.insert(0, sys.argv[1])\n"
        # Started from a shell's background, SIGINT is ignored and stays so.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from pathlib import Path\n"
        "from translation_scaling import execute as executing\n"
        "from translation_scaling.runs import plan_runs\n"
        "executing.TRAIN = (sys.executable, sys.argv[2])\n"
        "paths = [Path(word) for word in sys.argv[3:5]]\n"
        "sys.exit(executing.execute(plan_runs(paths, [1, 2], ['training.batch_size=4'], Path(sys.argv[5]))))\n"
    )
    words = [str(ROOT / "scripts"), str(tmp_path / "fake.py"), str(runs[0].recipe), str(runs[1].recipe)]
    process = Program(tmp_path, text, *words, str(fake_training))
    deadline = time.monotonic() + 240
    while not (fake_training / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == executing.EXIT_STOPPED
    assert "a, seed 1: log" in output
    assert "stopped; the same command goes on" in output
    assert calls(fake_training) == ["a 1"]


# ---------------------------------------------------------------------- the report


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes longer than the report."""
    monkeypatch.setattr(scaling, "draw", lambda *_: None)


def report_of(output: Path, *words: str) -> str:
    assert scaling.main(["--report-only", "--output", str(output), *words]) == 0
    return (output / "report.md").read_text()


@pytest.mark.usefixtures("no_pictures")
def test_the_report_has_every_number_and_names_both_pictures(tmp_path: Path) -> None:
    results = results_of(tmp_path, World(same(5.0), same(2.0)))
    text = report_of(tmp_path)
    for measure in (NLL, CHRF):
        for bucket in ("high", "middle", "low", None):
            found = compare(results, "laptop-deep", "laptop-wide", measure, bucket)
            assert f"{found.mean:+.{measure.digits}f}" in text
    assert "laptop-deep is better than laptop-wide" in text
    assert "Nothing but their names." in text
    assert "(resumed)" not in text
    for name in ("languages.png", "buckets.png"):
        assert f"({name})" in text
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 2 * NUM_LANGUAGES
    for row in rows:
        assert float(row["chrf_minus_copy"]) == pytest.approx(float(row["chrf"]) - 20)
    assert {row["bucket"] for row in rows} == {"high", "middle", "low"}
    with (tmp_path / "runs.csv").open(newline="") as file:
        assert [row["peak_bytes"] for row in csv.DictReader(file)] == [str(400 << 20)] * 6


def test_pictures_are_drawn_again_from_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results_of(tmp_path, World(same(5.0), same(2.0)))
    curve = [
        {"step": 10 * n, "epoch": n, "loss": 1 / n, "eval_nll_per_character": 2 / n}
        | {"training_seconds": 1.0, "tokens_per_second": 100.0}
        for n in (1, 2, 3)
    ]
    lines = "".join(json.dumps(entry) + "\n" for entry in curve)
    (tmp_path / "laptop-deep" / "seed-1" / "metrics.jsonl").write_text(lines)
    assert "![Curves](curves.png)" in report_of(tmp_path)
    tables = tmp_path / "committed"
    tables.mkdir()
    for path in tmp_path.glob("*.csv"):
        shutil.copy(path, tables)
    assert scaling.main(["--draw", str(tables)]) == 0
    for name in ("languages.png", "buckets.png", "curves.png"):
        assert (tables / name).read_bytes() == (tmp_path / name).read_bytes()
        assert (tables / name).read_bytes().startswith(b"\x89PNG")
    assert scaling.main(["--draw", str(tmp_path / "none")]) == 2
    assert "there is no" in capsys.readouterr().err


def test_models_of_many_languages_are_compared_with_those_of_one(tmp_path: Path) -> None:
    results = results_of(tmp_path, World(same(5.0), same(2.0), spread=0.0), seeds=(1,))
    base = results.rows[results.rows["recipe"] == "laptop-base"]

    def alone(languages: list[str], **changes: Any) -> pd.DataFrame:
        own = base[base["language"].isin(languages)]
        nll = own["nll_per_character"] + 0.5
        return own.assign(
            **{"recipe": "alone-" + own["language"], "bucket": "high", "nll_per_character": nll, **changes}
        )

    languages = results.languages[::3]
    found = with_baselines(results, pd.concat([alone(languages), base]))
    assert found is not None
    assert found.models == (*MODELS, BASELINE)
    assert found.languages == languages
    assert set(found.buckets) == {"high", "middle", "low"}, "not those of a language alone"
    assert compare(found, "laptop-base", BASELINE, NLL).mean == pytest.approx(-0.5)
    assert compare(found, "laptop-deep", BASELINE, NLL).mean == pytest.approx(-0.55)
    assert with_baselines(results, pd.DataFrame()) is None
    with pytest.raises(DataError, match="not trained and tested on the same pairs"):
        with_baselines(results, alone(["l00"], training_pairs=3))


@pytest.mark.usefixtures("no_pictures")
def test_a_report_of_a_part_says_what_is_missing(tmp_path: Path) -> None:
    write_run(tmp_path, "laptop-base", 1, lambda *_: (1.0, 40.0))
    write_run(tmp_path, "laptop-deep", 1, lambda *_: (0.9, 44.0))
    (tmp_path / "laptop-wide.yaml").write_text(RECIPE)
    recipes = [str(tmp_path / f"{name}.yaml") for name in MODELS]
    assert scaling.main([*recipes, "--seeds", "1", "--report-only", "--output", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "Not finished, and so not in any number below: laptop-wide, seed 1." in text
    assert "laptop-deep is better than laptop-base" in text
    assert "laptop-wide |" not in text


def test_runs_of_other_pairs_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, "laptop-base", 1, lambda *_: (1.0, 40.0))
    write_run(tmp_path, "laptop-deep", 1, lambda *_: (0.9, 44.0), num_languages=20)
    with pytest.raises(DataError, match="not trained and tested on the same pairs"):
        Results.of_runs(finished_runs(tmp_path, None, None))
    assert scaling.main(["--report-only", "--output", str(tmp_path)]) == 2
    assert "cannot be compared" in capsys.readouterr().err


@pytest.mark.usefixtures("no_pictures")
def test_a_run_that_diverged_is_named_and_in_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model, seed, nll in (("x-base", 1, 1.0), ("x-deep", 1, 0.9), ("x-deep", 2, float("nan"))):
        write_run(tmp_path, model, seed, lambda *_, nll=nll: (nll, 40.0))
    text = report_of(tmp_path)
    assert "Diverged, with scores that are no numbers, and so not in any number below: x-deep, seed 2." in text
    assert re.search(r"30 of 30 \| +x-deep is better than x-base \|", text)
    assert "nan" not in text
    assert len((tmp_path / "runs.csv").read_text().splitlines()) == 4, "the tables have it"
    assert scaling.main(["--report-only", "--output", str(tmp_path), "--seeds", "2"]) == 2
    assert "their trainings diverged" in capsys.readouterr().err


def test_languages_of_unknown_size_have_no_place_in_a_report(tmp_path: Path) -> None:
    path = write_run(tmp_path, "x-base", 1, lambda *_: (1.0, 40.0)) / "metrics.json"
    metrics = json.loads(path.read_text())
    metrics["per_language"]["l03"] |= {"training_pairs": None, "bucket": None}
    path.write_text(json.dumps(metrics))
    with pytest.raises(DataError, match=r"how many training pairs l03 has.*data\.counts"):
        finished_runs(tmp_path, None, None)


def test_seeds_agree_where_they_have_the_sign_of_the_mean() -> None:
    def of(mean: float, *seeds: float) -> str:
        return Difference("a", "b", CHRF, None, mean, None, dict(enumerate(seeds)), 5, 3).seeds_agree

    assert of(1.0, 3.0, -1.0) == "1 of 2"
    assert of(0.0, 1.0, -1.0) == "0 of 2"
    assert of(1.0, 1.0) == of(1.0) == "", "too few to tell"


def test_metrics_of_another_version_are_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "laptop-base", 1, lambda *_: (1.0, 40.0))
    metrics = json.loads((folder / "metrics.json").read_text())
    del metrics["cost"]
    (folder / "metrics.json").write_text(json.dumps(metrics))
    with pytest.raises(DataError, match="has no cost"):
        finished_runs(tmp_path, None, None)


def test_nothing_to_report_is_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scaling.main(["--report-only", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: no run is finished, so there is nothing to report\n"
    assert scaling.main(["--seeds", "x"]) == 2
    assert scaling.main([]) == 2


# ---------------------------------------------------------------------- the whole of it


def test_a_tiny_recipe_from_training_to_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One training alone, for each costs seconds; how several are compared is tested on synthetic runs."""
    assert (sys.executable, "-m", "hf_gpipe.train") == executing.TRAIN
    monkeypatch.setattr(executing, "start", Training)
    recipe, output = tmp_path / "tiny-base.yaml", tmp_path / "out"
    recipe.write_text(RECIPE)
    words = [str(recipe), "--output", str(output), "data.max_number=99", "--seeds", "3"]
    assert scaling.main([*words, "--status"]) == 0
    assert capsys.readouterr().out.startswith("tiny-base, seed 3: not begun\n")
    assert not output.exists()
    assert scaling.main(words) == 0, (output / "tiny-base" / "seed-3" / "run.log").read_text()
    assert "[1/1] tiny-base, seed 3: log" in capsys.readouterr().out
    text = (output / "report.md").read_text()
    assert "Updates: tiny-base: 1." in text
    assert "![Scores and differences by bucket]" in text
    with (output / "runs.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["tokens_per_second"]) > 0
    metrics = output / "tiny-base" / "seed-3" / "metrics.json"
    kept = metrics.stat().st_mtime_ns
    assert load_recipe(metrics.with_name("recipe.yaml")).training.seed == 3
    assert scaling.main(words) == 0
    assert capsys.readouterr().out.count("finished already") == 1
    assert metrics.stat().st_mtime_ns == kept
