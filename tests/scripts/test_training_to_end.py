"""scripts/scaling.py trains to the end: when that is, and that a run goes on from whatever is left of it."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import pytest
import scaling
from hypothesis import given, settings
from hypothesis import strategies as st
from translation_scaling import execute, status
from translation_scaling import to_end as ending
from translation_scaling.curves import Curve, Point, newest_checkpoint, read_curve
from translation_scaling.draw import draw_curves
from translation_scaling.experiments import ALONE, EXPERIMENTS, LOW, RELATED, Asked, plan_experiments
from translation_scaling.keep import bring_back, keep
from translation_scaling.learning import Learning, at_equal_compute, at_equal_updates, learning
from translation_scaling.results import Finished
from translation_scaling.runs import Run
from translation_scaling.share import part_of
from translation_scaling.status import hours_text, status_text
from translation_scaling.to_end import next_part

from hf_gpipe.data import build_corpus
from hf_gpipe.errors import UserError
from hf_gpipe.recipe import DataSection, load_recipe
from scripts.forked import Forked
from scripts.forked import train as forked_train
from tests.forked_command import Program, Training

ROOT = Path(__file__).parents[2]
WORDS = ("file", "window", "picture", "letter", "number", "page", "line", "word", "key", "name")

RECIPE = """
model: {config: {model_type: marian, d_model: 16, encoder_layers: 1, decoder_layers: 1, encoder_ffn_dim: 16,
                 decoder_ffn_dim: 16, encoder_attention_heads: 2, decoder_attention_heads: 2,
                 max_position_embeddings: 64}}
data: {kind: jsonl, path: PATH, source_field: tgt, target_field: src, english: target, language_field: tgt_lang,
       split_by: target, validation_fraction: 0.15, test_fraction: 0.15, temperature: 5.0}
tokenizer: {vocab_size: 290}
pipeline: {num_stages: 1, num_micro_batches: 1, device: cpu, schedule: gpipe, partition: count, recompute: none}
training: {output_dir: none, batch_size: 16, learning_rate: 1.0e-12, lr_scheduler_type: warmup_stable_decay,
           logging_steps: 1, eval_steps: 1, save_steps: 4}
evaluation: {max_examples: 4, max_new_tokens: 4, samples: 1}
"""


def write_corpus(path: Path, sizes: dict[str, int]) -> Path:
    """Pairs of some languages, whose English sentences recur."""
    with gzip.open(path, "wt", encoding="utf-8") as lines:
        for language, size in sizes.items():
            for number in range(size):
                english = f"Open {WORDS[number % 10]} of the {WORDS[number // 10]}"
                row = {"src": english, "tgt": f"{language} {english[::-1]}", "tgt_lang": language}
                lines.write(json.dumps(row) + "\n")
    return path


def recipe_of(tmp_path: Path, **sizes: int) -> Path:
    corpus = write_corpus(tmp_path / "pairs.jsonl.gz", sizes or {"de": 60, "fr": 40, "sw": 20})
    path = tmp_path / "tiny-base.yaml"
    path.write_text(RECIPE.replace("PATH", str(corpus)))
    return path


# ---------------------------------------------------------------------- the end


def curve_of(losses: list[float], every: int = 10, per_pass: int = 40) -> list[Point]:
    return [Point(every * n, every * n / per_pass, loss) for n, loss in enumerate(losses, 1)]


def test_a_curve_that_falls_has_no_end_and_a_flat_one_ends_after_three_passes() -> None:
    assert ending.end_of_constant_rate(curve_of([1.0 / n for n in range(1, 200)])) is None
    assert ending.end_of_constant_rate(curve_of([1.0] * 100)) == 120


def test_overfitting_counts_as_no_change() -> None:
    """The best loss decides: one that rises again does not fall."""
    assert ending.end_of_constant_rate(curve_of([1.0, 0.5, *[0.6 + 0.01 * n for n in range(60)]])) == 120


@pytest.mark.parametrize(("late", "extra", "is_ended"), [(0.5, 0.5, True), (1.5, 0.5, False), (0.5, 1.5, False)])
def test_both_changes_must_be_small(late: float, extra: float, is_ended: bool) -> None:
    """Of 120 updates 20 are extra; the last tenth of the 100 before begins after 90."""
    losses = [1.0] * 9 + [1 - late / 100] + [(1 - late / 100) * (1 - extra / 100)] * 2
    verdict = ending.judge([Point(10 * n, n, loss) for n, loss in enumerate(losses, 1)])
    assert verdict.is_ended == is_ended
    assert verdict.late_change == pytest.approx(late / 100)
    assert verdict.extra_change == pytest.approx(extra / 100)


def test_too_few_evaluations_are_no_end() -> None:
    assert not ending.judge([]).is_ended
    assert not ending.judge(curve_of([1.0] * 2, every=100)).is_ended, "there is none in the last tenth"


@settings(deadline=None)
@given(
    st.lists(st.floats(0.01, 10), min_size=1, max_size=60),
    st.integers(1, 50),
    st.integers(1, 400),
)
def test_decisions_go_on_and_end(losses: list[float], every: int, per_pass: int) -> None:
    points = curve_of(losses, every, per_pass)
    following = ending.next_decision(points, every)
    assert following > points[-1].step
    assert following % every == 0
    assert following >= ending.FEWEST_PASSES * per_pass or points[-1].passes >= ending.FEWEST_PASSES - 1e-6
    assert ending.end_of_decay(following, every) > following
    assert ending.expected_end(points, every) >= ending.FEWEST_PASSES * per_pass
    ended = ending.end_of_constant_rate(points)
    assert ended is None or ended >= ending.FEWEST_PASSES * per_pass - 1e-6


# ---------------------------------------------------------------------- curves


def entries(*steps: int, rate: Any = lambda step: 1.0, loss: Any = lambda step: 1.0, per_pass: int = 10) -> Curve:
    return Curve(
        tuple(
            {
                **{"step": step, "epoch": step / per_pass, "loss": 2.0, "learning_rate": rate(step)},
                **{"eval_nll_per_character": loss(step), "training_seconds": 2.0, "tokens_per_second": 50.0},
            }
            for step in steps
        )
    )


def test_models_are_compared_at_equal_updates_and_at_equal_compute() -> None:
    curves = {
        "small": entries(*range(1, 41), loss=lambda step: 10 / step),
        "large": entries(*range(1, 21), loss=lambda step: 5 / step),
    }
    assert at_equal_updates(curves) == (20, {"small": 0.5, "large": 0.25})
    # 100 tokens an update: 20 updates of the large one cost what 80 of the small one would.
    operations, losses = at_equal_compute(curves, {"small": 1.0, "large": 4.0})
    assert operations == 40 * 100
    assert losses == {"small": 0.25, "large": 0.5}


# ---------------------------------------------------------------------- the data


def test_a_share_has_the_same_part_of_each_language_s_training_pairs(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "pairs.jsonl.gz", {"de": 60, "fr": 60, "sw": 9})
    data = DataSection(kind="jsonl", path=str(path), source_field="tgt", target_field="src", split_by="target")
    with pytest.raises(UserError, match=r"needs a corpus in one file"):
        part_of(data, 0.5, tmp_path)
    data = load_recipe(recipe_of(tmp_path, de=90, fr=90, sw=20)).data
    whole = build_corpus(data)
    assert part_of(data, 1.0, tmp_path) == Path(str(data.path))
    with pytest.raises(UserError, match=r"--share 1.5: it must be"):
        part_of(data, 1.5, tmp_path)
    paths = {share: part_of(data, share, tmp_path / "parts") for share in (0.25, 0.5)}
    rows = {share: {str(row) for row in rows_of(path)} for share, path in paths.items()}
    assert rows[0.25] < rows[0.5]
    part = build_corpus(data.replace(path=str(paths[0.5])))
    of_language = {language: [pair for pair in part.train if pair.language == language] for language in part.languages}
    trained = Counter(pair.language for pair in whole.train)
    assert {language: len(pairs) for language, pairs in of_language.items()} == {
        language: math.ceil(number / 2) for language, number in trained.items()
    }
    for split in ("validation", "test"):
        assert Counter(getattr(part, split)) == Counter(getattr(whole, split)), "the same is evaluated"
    assert {pair.target for pair in of_language["de"]} != {pair.target for pair in of_language["fr"]}


def rows_of(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@settings(deadline=None, max_examples=20)
@given(st.dictionaries(st.sampled_from(["de", "fr", "sw", "zh"]), st.integers(20, 100), min_size=1))
def test_no_english_sentence_is_in_two_splits(sizes: dict[str, int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus = build_corpus(load_recipe(recipe_of(Path(folder), **sizes)).data)
        splits = [{pair.target for pair in split} for split in (corpus.train, corpus.validation, corpus.test)]
    assert splits[0]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not splits[one] & splits[other]


# ---------------------------------------------------------------------- the plan


def test_the_plan_has_every_run_once_and_a_sweep_before_it(tmp_path: Path) -> None:
    runs = plan_experiments([one.name for one in EXPERIMENTS], [Asked(1, [], tmp_path)])
    names = [run.name for run in runs]
    assert len(set(names)) == len(names)
    for place, run in enumerate(runs):
        assert {one.name for one in run.sweep} <= set(names[:place])
    recipe = load_recipe(ROOT / "recipes" / "translation" / "l10n-base.yaml")
    assert len(recipe.data.languages) == len(set(recipe.data.languages)) == 102
    assert set(LOW) < set(recipe.data.languages)
    assert len(LOW) == 34
    assert set(RELATED) < set(recipe.data.languages)
    by_name = {run.name: run.resolved() for run in runs}
    batches = {name: one.training for name, one in by_name.items() if name.startswith("l10n-batch-")}
    tokens = {name: one.batch_tokens * one.max_steps for name, one in batches.items() if one.batch_tokens}
    assert [name for name, count in tokens.items() if count > 5_990_000] == [
        f"l10n-batch-{name}-base" for name in ("4000-1500", "1000-6000", "260-23076")
    ]
    assert [one.batch_tokens for one in batches.values() if one.max_steps == 1500] == [4000, 1000, 260]
    assert set(ALONE) < set(RELATED)
    assert by_name["l10n-T-100-deep"].data.temperature == 100
    assert (
        by_name["rate-related-deep-0.004"].data.languages == by_name["l10n-related-deep"].data.languages == [*RELATED]
    )
    assert by_name["l10n-deeper"].model.config["decoder_layers"] == 16
    with pytest.raises(UserError, match=r"neither a recipe \(.yaml\) nor an experiment; did you mean 'main'"):
        plan_experiments(["mian"], [Asked(1, [], tmp_path)])


def test_the_best_rate_of_a_sweep_is_taken(tmp_path: Path) -> None:
    run = next(run for run in plan_experiments(["main"], [Asked(1, [], tmp_path)]) if run.name == "l10n-base")
    assert run.resolved().training.learning_rate == 2e-3, "the recipe's own, before there is a sweep"
    for one, loss in zip(run.sweep, (0.5, 0.4, 0.3), strict=True):
        one.folder.mkdir(parents=True)
        entry = {"step": 1, "epoch": 0.1, "eval_nll_per_character": loss}
        (one.folder / "metrics.jsonl").write_text(json.dumps(entry) + "\n")
    assert run.resolved().training.learning_rate == 4e-3
    half = replace(run, rate_factor=0.5)
    assert half.resolved().training.learning_rate == 2e-3


def test_without_its_sweep_a_run_that_has_begun_keeps_its_rate(tmp_path: Path) -> None:
    run = next(
        run for run in plan_experiments(["related"], [Asked(2, [], tmp_path)]) if run.name == "l10n-related-deep"
    )
    assert run.resolved().training.learning_rate == 2e-3
    given = replace(run, overrides=(*run.overrides, "training.learning_rate=1e-3"), sweep=())
    run.folder.mkdir(parents=True)
    (run.folder / "recipe.yaml").write_text(given.resolved().to_yaml())
    assert run.progress()[0] == "begun"
    assert replace(run, rate_factor=0.5).resolved().training.learning_rate == 1e-3


def test_hours_follow_from_pairs_and_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(status.TOKENS_PER_SECOND, "base", 1000)
    (tmp_path / "l10n.json").write_text(json.dumps({"pairs": {"fr": 1000, "de": 3000}}))
    path = f"data.path={tmp_path / 'l10n.jsonl.gz'}"
    words = [path, "data.languages=[fr]", "data.test_fraction=0.1", "data.validation_fraction=0.1"]
    runs = [run for run in plan_experiments(["main"], [Asked(1, words, tmp_path)]) if run.name == "l10n-base"]
    hours = 3.6 * 1000 * 0.5 * 0.8 * status.TOKENS_PER_PAIR / 1000 / 3600
    monkeypatch.setattr(status, "TOKENS_PER_PAIR", status.TOKENS_PER_PAIR * 10 / hours)
    assert hours_text(runs, 0.5) == "[1/1] l10n-base, seed 1: at least 10.0 hours\nin all at least 10.0 hours"
    assert scaling.main(["--list", path, "--output", str(tmp_path)]) == 0
    assert all(f"{one.name}: {one.question}" in capsys.readouterr().out for one in EXPERIMENTS[:1])


# ---------------------------------------------------------------------- the whole of it


def train(recipe: Path, output: Path, *words: str) -> int:
    return scaling.main([str(recipe), "--to-end", "--output", str(output), *words])


def interruptible(*words: str) -> int:
    """The script, in this process, with its trainings forked from it."""

    def start(arguments: Sequence[str], log: TextIO) -> Forked:
        def train_into_log() -> int:
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)
            return forked_train(list(arguments))

        return Forked(train_into_log)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    execute.start = start  # type: ignore[assignment]
    return scaling.main(list(words))


def test_an_interrupted_run_ends_from_its_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, output, kept = recipe_of(tmp_path), tmp_path / "out", tmp_path / "kept"
    folder = output / "tiny-base" / "seed-1"
    process = Program(
        tmp_path / "program", interruptible, str(recipe), "--to-end", "--output", str(output), "--keep", str(kept)
    )
    deadline = time.monotonic() + 300
    while read_curve(folder).step < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 75
    before = read_curve(folder)
    run = Run(recipe, 1, (), output, to_end=True)
    text = status_text([run], now=lambda: datetime(2030, 1, 1))
    assert f"tiny-base, seed 1: constant rate ({before.points[-1].passes:.1f} passes" in text
    assert f"update {before.step} of about " in text

    monkeypatch.setattr(execute, "start", Training)
    # Another machine, on which only the copies are left.
    shutil.rmtree(output)
    assert train(recipe, output, "--keep", str(kept)) == 0, (folder / "run.log").read_text()
    curve = read_curve(folder)
    assert [entry for entry in curve.entries if entry["step"] <= 2] == [
        entry for entry in before.entries if entry["step"] <= 2
    ]
    assert "train_loss" in curve.entries[-1]
    training = load_recipe(folder / "recipe.yaml").training
    begin = training.max_steps - training.decay_steps
    assert begin == ending.end_of_constant_rate(curve.constant_points(begin)), "no update was too many"
    assert curve.step == training.max_steps == ending.end_of_decay(begin, 1)
    rates = {entry["step"]: entry["learning_rate"] for entry in curve.entries if "loss" in entry}
    assert all(rates[step] == training.learning_rate for step in range(2, begin + 2))
    assert 0 < rates[training.max_steps] < rates[begin + 2] < training.learning_rate

    assert "tiny-base, seed 1: finished" in status_text([run])
    kept_curve = read_curve(kept / "tiny-base" / "seed-1")
    assert kept_curve == curve
    assert newest_checkpoint(kept / "tiny-base" / "seed-1").name == f"checkpoint-{training.max_steps}"
    assert "eval_nll_per_character" in (output / "curves.csv").read_text().splitlines()[0]
    assert "Updates: tiny-base: " in (output / "report.md").read_text()
    capsys.readouterr()
    assert train(recipe, output) == 0
    assert "finished already" in capsys.readouterr().out


def test_parts_follow_from_what_is_there(tmp_path: Path) -> None:
    """Each start of the command is decided by the curve; a decay that was decided is not decided anew."""
    recipe = load_recipe(recipe_of(tmp_path), ["training.eval_steps=10"])
    folder = tmp_path / "run"
    folder.mkdir()

    def part(curve: Curve) -> set[str]:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in curve.entries))
        found = next_part(folder, recipe)
        assert found is not None
        return {word for word in found if word.startswith("training")}

    first = {"training.num_train_epochs=3.0", "training.decay_steps=0"}
    assert part(Curve(())) == first | {"training.max_steps=null"}
    falling = {"loss": lambda step: 1 / step, "per_pass": 100}
    assert part(entries(*range(10, 290, 10), **falling)) == first | {"training.max_steps=300"}
    assert part(entries(*range(10, 310, 10), **falling)) == first | {"training.max_steps=330"}
    decay = {"training.max_steps=360", "training.decay_steps=60"}
    flat = entries(*range(10, 310, 10), per_pass=100)
    assert part(flat) == decay
    (folder / "recipe.yaml").write_text(load_recipe(recipe_of(tmp_path), sorted(decay)).to_yaml())
    assert part(entries(*range(10, 340, 10), per_pass=100)) == decay
    (folder / "metrics.json").write_text("{}")
    assert next_part(folder, recipe) is None


def test_the_report_says_how_the_runs_learnt(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, de=60, fr=40)
    runs, recipe_read = [], load_recipe(recipe)
    for name, losses in (("small", [3.0, 2.5, 2.4]), ("large", [2.8, 2.2, 2.3, 2.1])):
        run = Run(recipe, 1, (), tmp_path / "out", name)
        run.folder.mkdir(parents=True)
        (run.folder / "recipe.yaml").write_text(run.resolved().to_yaml())
        lines = [
            {"step": 10 * n, "epoch": n, "loss": loss - 1, "eval_loss": 2 * loss, "eval_nll_per_character": loss}
            | {"training_seconds": 1.0, "tokens_per_second": 1000.0, "learning_rate": 1e-3}
            for n, loss in enumerate(losses, 1)
        ]
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        metrics = {"per_language": {}, "nll_per_character": min(losses), "cost": {}}
        (run.folder / "metrics.json").write_text(json.dumps(metrics))
        runs.append(Learning.of(Finished.read(run.folder)))
    text = learning(runs, recipe_read)
    header, _, small, large = (line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|"))
    assert [word.strip() for word in header][7:9] == ["at 30 updates", "at 0.00M tokens"]
    assert [word.strip() for word in small][1:] == ["30", "3.0", "2.4000", "30", "1.4000", "4.8000", *["2.4000"] * 3]
    assert [word.strip() for word in large][1:] == ["40", "4.0", "2.1000", "40", "1.1000", "4.2000", *["2.2000"] * 3]
    pairs = build_corpus(recipe_read.data).train
    assert f"The {len(pairs)} training pairs have {len({pair.target for pair in pairs})} distinct targets" in text
    draw_curves(tmp_path / "curves.png", runs)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_recipe_that_has_no_end_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_of(tmp_path)
    assert train(recipe, tmp_path, "training.lr_scheduler_type=linear") == 2
    assert "needs warmup_stable_decay" in capsys.readouterr().err
    assert train(recipe, tmp_path, "training.eval_steps=null") == 2
    assert "training.eval_steps is null" in capsys.readouterr().err
    assert scaling.main([str(recipe), "main"]) == 2
    assert "give one command for each kind" in capsys.readouterr().err


def test_copies_are_made_and_brought_back_where_they_are_ahead(tmp_path: Path) -> None:
    folder, kept = tmp_path / "run", tmp_path / "kept"
    for step in (5, 10):
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        (folder / f"checkpoint-{step}" / "weights").write_text(str(step))
    (folder / "metrics.jsonl").write_text('{"step": 10}\n')
    keep(folder, kept)
    assert sorted(path.name for path in kept.iterdir()) == ["checkpoint-10", "metrics.jsonl"]
    (folder / "checkpoint-20").mkdir()
    keep(folder, kept)
    assert [path.name for path in kept.glob("checkpoint-*")] == ["checkpoint-20"]
    bring_back(kept, tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["checkpoint-20", "metrics.jsonl"]
    for best in ("checkpoint-10", "checkpoint-20"):
        state = json.dumps({"best_model_checkpoint": str(folder / best)})
        (folder / "checkpoint-20" / "trainer_state.json").write_text(state)
        shutil.rmtree(kept)
        keep(folder, kept)
        keep(folder, kept)
        names = sorted({best, "checkpoint-20"})
        assert sorted(path.name for path in kept.glob("checkpoint-*")) == names
        shutil.rmtree(tmp_path / "new")
        bring_back(kept, tmp_path / "new")
        assert sorted(path.name for path in (tmp_path / "new").glob("checkpoint-*")) == names
    (folder / "checkpoint-30").mkdir()
    bring_back(kept, folder)
    assert newest_checkpoint(folder).name == "checkpoint-30"
