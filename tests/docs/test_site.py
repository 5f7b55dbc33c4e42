"""The site builds strictly, where mkdocs is installed or HF_GPIPE_MKDOCS names it (the extra "docs")."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import REPOSITORY

MKDOCS = os.environ.get("HF_GPIPE_MKDOCS") or shutil.which("mkdocs")


@pytest.mark.skipif(MKDOCS is None, reason="mkdocs is not installed: pip install -e '.[docs]'")
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    command = ["bash", "scripts/docs.sh", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "HF_GPIPE_MKDOCS": str(MKDOCS)}
    built = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=280)
    assert built.returncode == 0, built.stderr[-3000:]
    page = (tmp_path / "site/index.html").read_text()
    assert 'href="your_model.html"' in page
    assert 'href="../' not in (tmp_path / "site/trainer.html").read_text(), "a link leaves the site"
