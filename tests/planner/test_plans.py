"""Plans of recipes stay as they are: configuration, memory and time, as an earlier version of the planner had them.

With an older transformers, models compute a little more or less: Marian draws a number for each layer, for example.

A change that is meant to change plans writes plans.json anew, from what hf-gpipe plan ... --json prints; of
the pipeline it has the keys that are not at their default.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_gpipe.commands.plan import main
from hf_gpipe.settings.pipeline import OF_THE_RUN, PipelineConfig
from hf_gpipe.settings.section import keys_of
from tests.versions import OLD_TRANSFORMERS

PLANS = json.loads((Path(__file__).parent / "plans.json").read_text())
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan["arguments"][0])
def test_a_plan_stays_as_it_is(plan: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    recipe, *options = plan["arguments"]
    assert main([str(ROOT / recipe), *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    defaults = {name: key.default for name, key in keys_of(PipelineConfig).items() if name not in OF_THE_RUN}
    expected = defaults | plan["settings"]
    if OLD_TRANSFORMERS:
        expected["partition"] = found["settings"]["partition"]
    assert found["settings"] == expected
    memory = [process["memory_bytes"]["total"] for process in found["processes"]]
    assert found["peak_bytes"] == pytest.approx(plan["peak_bytes"], rel=0.01 if OLD_TRANSFORMERS else 0)
    assert memory == pytest.approx(plan["bytes_of_processes"], rel=0.01 if OLD_TRANSFORMERS else 0)
    assert found["step_seconds"] == pytest.approx(plan["step_seconds"], rel=0.1 if OLD_TRANSFORMERS else 1e-9)
