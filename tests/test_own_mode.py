"""A mode of your own is one folder: it changes tables, adds seconds and bytes to plans, and wraps actions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path

import pytest

import hf_gpipe.modes
from hf_gpipe import Pipeline, registry
from hf_gpipe.errors import UserError
from hf_gpipe.runtime import performing
from hf_gpipe.schedule import kinds
from hf_gpipe.settings.mesh import MeshConfig
from hf_gpipe.settings.mode import with_modes
from hf_gpipe.settings.section import keys_of
from tests.oracle import assert_same, padded_batch, plain_model, run_pipeline, run_plain, tiny_config

KEY = '''
from hf_gpipe.settings.mode import Mode

class Noting(Mode):
    """Backwards that are noted."""

    notes_backwards: bool = False
    """Whether backwards are noted."""

FIELDS = {"noting": (Noting, Noting)}
'''
TABLE = '''
from dataclasses import replace
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import BACKWARD, ActionKind, Resource, add_kind

fields = {"resource": Resource.COPY_OUT, "needs": (BACKWARD,), "way": 0, "makes": "notes", "held_ticks": 1}
NOTE = add_kind(ActionKind("N", "note", **fields))

def apply(table, recompute):
    """Each backward of a table of training is noted."""
    if not table.is_training:
        return table
    row = lambda actions: tuple(
        one for action in actions
        for one in (action, *((Action(NOTE, action.stage, action.micro_batch),) if action.kind == BACKWARD else ()))
    )
    return replace(table, actions=tuple(map(row, table.actions)))
'''
COST = """
from hf_gpipe.modes.noting.table import NOTE

def seconds(layout):
    return {NOTE: [1000.0] * len(layout.stages)}

def amounts(sums, stage, of_graph):
    return {"notes": {"activations": 0}}

def host_amounts(sums, stage):
    return {}
"""
RUNTIME = '''
from hf_gpipe.modes.noting.table import NOTE
from hf_gpipe.runtime.performing import perform
from hf_gpipe.runtime.step import ModeState
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD

class State(ModeState):
    def __init__(self, rows):
        super().__init__(rows)
        self.seen, self.runs = [], 0
    def begin(self, options):
        self.runs += 1
    def wrap(self, schedule, worker, action, performed):
        """F and B are noted as they begin."""
        if action.kind not in (FORWARD, BACKWARD):
            return performed
        def run(step, planned, received):
            step.modes["noting"].seen.append(str(planned.action))
            return performed.run(step, planned, received)
        return performed._replace(run=run)

def note(step, planned, received):
    step.modes["noting"].seen.append(str(planned.action))
    return {}

perform(NOTE, note)
'''
CHECK = """
from hf_gpipe.errors import UserError

def check(config, adapter, loss, *, packing, probe):
    if config.num_stages == 3:
        raise UserError("noting needs 2 stages")

def verify(config, adapter, *, packing, probe):
    if config.schedule == "gpipe":
        raise UserError("noting needs 1f1b")
"""
CUTTING = '''
from dataclasses import replace

class Halves:
    """Cuts the rows of each micro-batch into halves, which are a group."""
    most = 2
    def check(self, adapter, batch, *, packing):
        self.is_checked = True
    def cut(self, micro_batches, adapter):
        halves = []
        for own in micro_batches:
            middle = own.num_rows // 2
            for rows in (slice(middle), slice(middle, None)):
                inputs = {name: tensor[rows] for name, tensor in own.inputs.items()}
                halves.append(replace(own, index=len(halves), inputs=inputs, group_size=2))
        assert self.is_checked
        return halves

def cutter(config):
    return Halves()
'''


def clear_caches() -> None:
    """Let the registry look for the modes again."""
    registry.parts_of_modes.cache_clear()
    registry.functions_of_modes.cache_clear()


@pytest.fixture
def mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The mode "noting" in a folder that is none of the package's."""
    folder = tmp_path / "noting"
    folder.mkdir()
    texts = {"__init__": "", "key": KEY, "table": TABLE, "cost": COST, "runtime": RUNTIME, "check": CHECK}
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(hf_gpipe.modes, "__path__", [*hf_gpipe.modes.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "MODES", (*registry.MODES, "noting"))
    clear_caches()
    yield
    clear_caches()
    for name in [name for name in sys.modules if name.startswith("hf_gpipe.modes.noting")]:
        del sys.modules[name]
    performing.PERFORMED.pop("N", None)
    kinds.KINDS.pop("N", None)  # type: ignore[call-overload]  # a kind is its letter
    kinds.needs_of.cache_clear()
    kinds.awaited_by.cache_clear()


@pytest.mark.usefixtures("mode")
def test_a_mode_of_your_own_is_one_folder() -> None:
    config = tiny_config("marian")
    model, batch = plain_model(config), padded_batch(config)
    pipe = Pipeline(model, 2, 3, "1f1b", "none", attn_implementation="eager")
    assert_same(run_pipeline(pipe, batch), run_plain(model, batch, 3))
    state = pipe.steps.executor.modes["noting"]
    assert state.runs == 1
    for stage in range(2):
        for micro_batch in range(3):
            order = [state.seen.index(f"{stage}{kind}{micro_batch}") for kind in "FBN"]
            assert order == sorted(order)
    assert len(state.seen) == 2 * 3 * 3
    assert pipe.plan(batch).step_seconds >= 3 * 1000, "its seconds are in plans"


@pytest.mark.usefixtures("mode")
def test_the_key_of_a_mode_of_your_own_is_one_of_a_configuration() -> None:
    """A mode's key was a field that the class of configurations named."""
    key = keys_of(with_modes(MeshConfig))["notes_backwards"]
    assert (key.path, key.text, key.default) == ("noting.notes_backwards", "Whether backwards are noted.", False)


@pytest.mark.usefixtures("mode")
def test_a_mode_of_your_own_checks_pipelines_and_cuts_micro_batches(tmp_path: Path) -> None:
    config = tiny_config("marian")
    model, batch = plain_model(config), padded_batch(config)
    with pytest.raises(UserError, match="noting needs 2 stages"):
        Pipeline(model, 3, 3, "1f1b", "none", attn_implementation="eager")
    with pytest.raises(UserError, match="noting needs 1f1b"):
        Pipeline(model, 2, 3, "gpipe", "none", attn_implementation="eager")
    (tmp_path / "noting" / "cutting.py").write_text(CUTTING)
    clear_caches()
    invalidate_caches()
    pipe = Pipeline(model, 2, 3, "1f1b", "none", attn_implementation="eager")
    assert_same(run_pipeline(pipe, batch), run_plain(model, batch, 3))
    assert len(pipe.steps.executor.modes["noting"].seen) == 2 * 6 * 3


def test_afterwards_it_is_gone() -> None:
    config = tiny_config("marian")
    pipe = Pipeline(plain_model(config), 2, 3, "1f1b", "none", attn_implementation="eager")
    assert "N" not in pipe.schedule(3).kinds
    assert "noting" not in pipe.steps.executor.modes
