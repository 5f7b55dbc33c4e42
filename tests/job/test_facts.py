from __future__ import annotations

from pathlib import Path

import pytest

from hf_gpipe.job import facts


@pytest.mark.parametrize(("limit", "used", "expected"), [("max", 0, 900), ("500", 450, 80)])
def test_a_container_has_the_memory_of_its_limit(
    limit: str, used: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("max", limit), ("current", str(used)), ("stat", "anon 400\ninactive_file 30\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(facts, "_CGROUP", tmp_path)
    monkeypatch.setattr(facts.psutil, "virtual_memory", lambda: type("", (), {"available": 900}))
    assert facts.available_memory() == expected
