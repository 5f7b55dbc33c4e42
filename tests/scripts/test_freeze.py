"""The results of scripts/freeze.py: each part sees a change that is planted in the package, on a few of its entries."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_gpipe import Pipeline, PipelineTrainingArguments
from hf_gpipe.checkpoint import state
from hf_gpipe.errors import UserError
from hf_gpipe.planner.machines.devices import DEVICES
from hf_gpipe.schedule import builders
from hf_gpipe.tasks.text import TokenBlocks
from scripts import freeze
from scripts.freezing import checkpoints, faults, noting, numbers, plans, price, results, rows, settings, tables
from scripts.freezing import tests as of_tests
from scripts.freezing.results import EXACT, Tolerance, differences


def differing(module: Any, names: list[str], plant: Callable[[], None]) -> list[str]:
    """The differences that a planted change makes in some entries of a part; without it there are none."""
    before = module.entries(names)
    assert not any(text.startswith(("Error", "there is no")) for text in before.values())
    assert not list(differences(before, module.entries(names), module.tolerance_of))
    plant()
    return list(differences(before, module.entries(names), module.tolerance_of))


def clear_tables() -> None:
    """No table that was built before is taken."""
    builders._build.cache_clear()


@pytest.fixture
def no_old_tables() -> Iterator[None]:
    yield
    clear_tables()


# ---------------------------------------------------------------------- planted changes


@pytest.mark.usefixtures("no_old_tables")
def test_a_table_that_has_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in tables.names() if name.startswith("schedule=1f1b stages=3 count=4 ")][:6]

    def plant() -> None:
        monkeypatch.setitem(builders.SCHEDULES, "1f1b", builders.SCHEDULES["gpipe"])
        clear_tables()

    assert any("    - process 0: " in text for text in differing(tables, names, plant))


def test_numbers_that_are_off_by_a_hundred_thousandth(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Pipeline.train_step

    def plant() -> None:
        monkeypatch.setattr(Pipeline, "train_step", lambda *args, **kwargs: step(*args, **kwargs) * (1 + 1e-5))

    assert len(differing(numbers, ["llama"], plant)) == 1


def test_a_checkpoint_whose_optimizer_state_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    read = state._read_slots

    def plant() -> None:
        def zeros(*args: Any, **kwargs: Any) -> Any:
            return _zeroed(read(*args, **kwargs))

        monkeypatch.setattr(state, "_read_slots", zeros)

    assert len(differing(checkpoints, ["full"], plant)) == 1


def _zeroed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: _zeroed(own) for key, own in value.items()}
    return value


def test_a_plan_on_a_device_that_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    [name] = [name for name in plans.names() if name == "causal/grpo --device a100-80"]
    slower = replace(DEVICES["a100-80"], bytes_per_second=DEVICES["a100-80"].bytes_per_second * 0.999)
    [text] = differing(plans, [name], lambda: monkeypatch.setitem(DEVICES, "a100-80", slower))
    assert "step_seconds" in text


def test_a_decided_plan_is_priced_as_it_was_planned() -> None:
    """The planner's account of a plan with everything given is the account with which it was chosen."""
    name = "causal/grpo --device a100-80"
    plan = plans.decided(name)
    [priced] = plans.account({name: plan}).values()
    assert priced["step_seconds"] == pytest.approx(plan["step_seconds"], rel=1e-9)
    assert (priced["fits"], priced["peak_bytes"]) == (plan["fits"], plan["peak_bytes"])


def test_plans_that_are_worse_by_the_other_planner_s_account() -> None:
    own = {"keys": {}}
    before = {"fits": True, "step_seconds": 2.0, "peak_bytes": 5}
    for priced, words in (
        ({"fits": True, "step_seconds": 2.01, "peak_bytes": 9}, None),
        ({"fits": True, "step_seconds": 2.03, "peak_bytes": 5}, "a step takes 2.03 s; before 2"),
        ({"fits": False, "step_seconds": 1.0, "peak_bytes": 9}, "it does not fit: 9 bytes; before 5"),
        ({"error": "no such key"}, "the other planner does not know it: no such key"),
    ):
        assert price._worse(own, before, priced, 0.01) == words
    assert price._worse({"error": "none fits"}, before, {}, 0.01) == "there was a plan, and now: none fits"
    assert price._worse(own, {"error": "none fits"}, {"fits": False}, 0.01) is None


def test_a_recipe_that_asks_for_another_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    made = settings.arguments_of

    def changed(recipe: Any) -> Any:
        return made(recipe.replace(training=recipe.training.replace(learning_rate=0.125)))

    found = differing(settings, ["run of causal/grpo"], lambda: monkeypatch.setattr(settings, "arguments_of", changed))
    assert len(found) == 1
    assert "learning_rate = 0.125" in found[0]


def test_rows_of_which_a_label_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    row = TokenBlocks.__getitem__

    def changed(blocks: TokenBlocks, index: int) -> Any:
        found = dict(row(blocks, index))
        return {**found, "labels": [-100, *found["labels"][1:]]}

    monkeypatch.setattr(rows, "DRAWN", 20)
    assert len(differing(rows, ["text"], lambda: monkeypatch.setattr(TokenBlocks, "__getitem__", changed))) == 1


def test_a_fault_that_is_no_longer_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    before = faults.all_entries("that are drawn", is_new=False)
    monkeypatch.setattr(faults, "FAULTS", faults.FAULTS[:-1])
    [text] = differences(before, faults.all_entries("that are drawn", is_new=False))
    assert "two runs with one MASTER_PORT" in text


def test_an_error_with_other_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text, the exit code of a command, and the arguments of a trainer are noted, without paths of the run."""
    monkeypatch.setenv("HF_GPIPE_NOTES", str(tmp_path))
    monkeypatch.setattr(pytest, "raises", pytest.raises)
    monkeypatch.setattr(noting._State, "test", "test_it[a]")
    monkeypatch.setattr(PipelineTrainingArguments, "__init__", PipelineTrainingArguments.__init__)
    noting._watch_raises()
    PipelineTrainingArguments.__init__ = noting._noting_init(  # type: ignore[method-assign]
        PipelineTrainingArguments, PipelineTrainingArguments.__init__
    )

    def run(words: str) -> dict[str, str]:
        for path in tmp_path.glob("*.jsonl"):
            path.unlink()
        with pytest.raises(UserError):
            raise UserError(f"{tmp_path}/mine.txt: {words}")
        assert noting._noting_main(lambda argv: 2)([]) == 2
        PipelineTrainingArguments(output_dir=str(tmp_path / "out"), max_steps=len(words), use_cpu=True)
        lines = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
        return {"test_it[a]": "\n".join(f"{kind}: {of_tests._plain(text)}" for _, kind, text in lines)}

    before = run("no such thing")
    assert "raised: UserError: PATH/mine.txt: no such thing\nexit code: 2\narguments: " in before["test_it[a]"]
    assert '"max_steps": "13"' in before["test_it[a]"]
    [text] = differences(before, run("no other thing"))
    assert "+ raised: UserError: PATH/mine.txt: no other thing" in text


# ---------------------------------------------------------------------- comparing


def test_entries_survive_their_file(tmp_path: Path) -> None:
    entries = {"b c": "two\nlines", "a": "with ### inside\n", "empty": ""}
    for name in ("some.txt", "some.txt.xz"):
        results.write(tmp_path / name, entries)
        assert results.read(tmp_path / name) == {"b c": "two\nlines", "a": "with ### inside", "empty": ""}
    with pytest.raises(ValueError, match="a line of an entry"):
        results.write(tmp_path / "some.txt", {"a": "one\n### two"})
    assert results.read(tmp_path / "none.txt") == {}


def test_numbers_within_a_tolerance_are_the_same_and_whole_numbers_are_exact() -> None:
    close, far = Tolerance(1e-6, 1e-9), "loss 1.5 of 3 rows"
    assert not list(differences({"a": far}, {"a": "loss 1.5000001 of 3 rows"}, lambda name: close))
    assert not list(differences({"a": "x 0.0"}, {"a": "x 1e-10"}, lambda name: close))
    for other in ("loss 1.5000001 of 4 rows", "loss 1.51 of 3 rows", "loss nan of 3 rows", "loss 1.5 of 3 lines"):
        [text] = differences({"a": far}, {"a": other}, lambda name: close)
        assert f"- {far}" in text
        assert f"+ {other}" in text
    assert list(differences({"a": "bytes 10000000000"}, {"a": "bytes 10000000001"}, lambda name: close))
    assert list(differences({"a": far}, {"a": "loss 1.5000001 of 3 rows"}, lambda name: EXACT))


def test_entries_that_are_gone_or_new() -> None:
    found = list(differences({"a": "1", "b": "2"}, {"b": "2", "c": "\n".join(map(str, range(40)))}))
    assert [text.partition(":")[0] for text in found] == ["a", "c"]
    assert "28 more lines" in found[1]


def test_the_command_says_what_differs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """The exit code is 1 if anything does; `write` makes it 0 again."""
    found = {"run": "loss 1.0"}
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(freeze, "ROOT", tmp_path)
    monkeypatch.setattr(freeze, "_check_versions", lambda: None)
    monkeypatch.setattr(freeze, "compute", lambda *args, **options: dict(found))
    assert freeze.main(["write", "numbers"]) == 0
    monkeypatch.setattr(numbers, "tolerance_of", lambda name: EXACT)
    assert freeze.main(["check", "numbers"]) == 0
    found["run"] = "loss 1.25"
    assert freeze.main(["check", "numbers"]) == 1
    assert "numbers: run: differs\n    - loss 1.0\n    + loss 1.25\n" in capsys.readouterr().out
    assert freeze.main(["write", "numbers"]) == freeze.main(["check", "numbers"]) == 0


def test_every_part_has_its_results() -> None:
    """Names of pages' blocks and of tests change more often; there are two hundred plans."""
    for part in freeze.PARTS:
        module = __import__(f"scripts.freezing.{part}", fromlist=[part])
        names, found = module.names(), results.read(results.FOLDER / module.FILE)
        assert len(set(names)) == len(names) > 1
        assert {*names} == {*found} if part in ("numbers", "checkpoints", "plans", "rows") else found
    assert len(plans.names()) >= 200
