"""The image of the Dockerfile has what the commands of its first lines need."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
TEXT = (REPOSITORY / "Dockerfile").read_text()


def has_docker() -> bool:
    docker = shutil.which("docker")
    return docker is not None and subprocess.run([docker, "info"], capture_output=True).returncode == 0


def test_its_commands_and_files_exist() -> None:
    commands = re.findall(r"^# +docker run .* hf_gpipe bash (\S+)", TEXT, re.MULTILINE)
    assert commands == ["scripts/quickstart.sh", "scripts/gpu_check.sh"]
    copied = re.findall(r"^COPY (.*) \./$", TEXT, re.MULTILINE)[0].split()
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    for name in (*commands, *copied):
        assert (REPOSITORY / name).is_file()
        assert name.split("/")[0] not in ignored
    torch = next(
        line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
    )
    assert torch in TEXT, "the version of the example is another one"


@pytest.mark.skipif(not has_docker(), reason="docker is not installed, or does not run")
def test_the_image_plans_a_model() -> None:
    subprocess.run(["docker", "build", "-q", "-t", "hf_gpipe-test", "."], cwd=REPOSITORY, check=True, timeout=1800)
    command = ["docker", "run", "--rm", "hf_gpipe-test", "hf-gpipe", "plan", "recipes/quickstart.yaml"]
    assert "verdict " in subprocess.run(command, check=True, capture_output=True, text=True).stdout
