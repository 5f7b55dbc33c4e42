"""A wheel in pieces is the same file again, and a damaged piece is an error."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from scripts.nccl_pieces import LIBRARY, MANIFEST, PiecesError, join, main, split


def test_a_wheel_in_pieces(tmp_path: Path) -> None:
    wheel, library = tmp_path / "nccl.whl", bytes(range(256)) * 40
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr(LIBRARY, library)
    folder = tmp_path / "pieces"
    assert len(split(wheel, folder, 1000)) > 10
    assert join(folder).read_bytes() == library
    last = sorted(folder.glob("piece-*"))[-1]
    whole = last.read_bytes()
    last.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(PiecesError, match=f"^{last.name} is damaged"):
        join(folder)
    last.unlink()
    with pytest.raises(PiecesError, match=f"^{last.name} is missing"):
        join(folder)
    (folder / MANIFEST).unlink()
    assert main(["join", str(folder)]) == 2


def test_another_wheel(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as files:
        files.writestr("other.py", "")
    split(tmp_path / "other.whl", tmp_path / "pieces", 1000)
    with pytest.raises(PiecesError, match=r"no .*libnccl.so.2; give one of nvidia-nccl-cu12"):
        join(tmp_path / "pieces")
