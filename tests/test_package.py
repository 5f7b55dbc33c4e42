"""The sdist and the wheel: they build, have every file of the package, and install with their command."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def run(*words: str | Path, folder: Path) -> str:
    """What a command prints last."""
    done = subprocess.run([sys.executable, *map(str, words)], cwd=folder, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def files() -> list[str]:
    """The files of the repository, as git has them or would add them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if (REPOSITORY / name).is_file()]


@pytest.mark.skipif(
    tuple(map(int, pytest.importorskip("setuptools").__version__.split(".")[:1])) < (77,),
    reason="pyproject.toml asks for setuptools 77 to build",
)
def test_the_sdist_and_its_wheel_install(files: list[str], tmp_path: Path) -> None:
    """The wheel is built from the sdist, so nothing that it needs is missing there."""
    source = tmp_path / "source"
    for name in files:
        if name.startswith(("hf_gpipe/", "pyproject", "README", "LICENSE", "MANIFEST", "tests/test_i")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPOSITORY / name).read_bytes())
    sdist = tmp_path / run("-c", BUILD, "build_sdist", tmp_path, folder=source)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert not (unpacked / "tests").exists()
    wheel = tmp_path / run("-c", BUILD, "build_wheel", tmp_path, folder=unpacked)
    package = {name for name in files if name.startswith("hf_gpipe/")}
    assert package - set(zipfile.ZipFile(wheel).namelist()) == set()

    run("-m", "pip", "install", "--no-deps", "--no-index", "--target", tmp_path / "site", wheel, folder=tmp_path)
    printed = run(
        "-c", "import sys; sys.path.insert(0, 'site'); import hf_gpipe; print(hf_gpipe.__file__)", folder=tmp_path
    )
    assert Path(printed) == tmp_path / "site/hf_gpipe/__init__.py"
    assert (tmp_path / "site/bin/hf-gpipe").is_file()


def test_the_citation_and_the_changelog_name_the_version() -> None:
    import hf_gpipe

    assert f"\nversion: {hf_gpipe.__version__}\n" in (REPOSITORY / "CITATION.cff").read_text()
    assert f"\n## {hf_gpipe.__version__}\n" in (REPOSITORY / "CHANGELOG.md").read_text()
