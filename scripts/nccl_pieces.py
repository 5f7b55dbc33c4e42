"""Carries NCCL's wheel to a machine without a network, in pieces that are checked by their digests.

    python scripts/nccl_pieces.py split nvidia_nccl_cu13-2.30.7-….whl FOLDER [--megabytes 60]
    python scripts/nccl_pieces.py join FOLDER            there, when all pieces are in FOLDER

`join` writes FOLDER/libnccl.so.2, loads it, which needs no GPU, and prints its version. With
`bash scripts/gpu_check.sh --one-gpu --nccl FOLDER/libnccl.so.2` the checks use it in place of torch's.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import sys
import zipfile
from pathlib import Path

MANIFEST, LIBRARY = "pieces.json", "nvidia/nccl/lib/libnccl.so.2"


class PiecesError(Exception):
    """A piece is missing or damaged, or the wheel is not NCCL's."""


def split(wheel: Path, folder: Path, piece_bytes: int) -> list[Path]:
    """Write a wheel as numbered pieces with a list of their digests; returns the pieces."""
    whole = wheel.read_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    pieces = {f"piece-{i // piece_bytes:02}": whole[i : i + piece_bytes] for i in range(0, len(whole), piece_bytes)}
    for name, content in pieces.items():
        (folder / name).write_bytes(content)
    digests = {name: _digest(content) for name, content in pieces.items()}
    (folder / MANIFEST).write_text(json.dumps({"wheel": _digest(whole), "pieces": digests}, indent=1) + "\n")
    return [folder / name for name in pieces]


def join(folder: Path) -> Path:
    """Put the wheel together and take its library out.

    Raises:
        PiecesError: a piece is missing, is not what was split, or there is no library in the wheel.
    """
    listed = json.loads((folder / MANIFEST).read_text())
    parts = []
    for name, digest in listed["pieces"].items():
        path = folder / name
        if not path.exists():
            raise PiecesError(f"{name} is missing; copy all {len(listed['pieces'])} pieces into {folder}")
        parts.append(path.read_bytes())
        if _digest(parts[-1]) != digest:
            raise PiecesError(f"{name} is damaged: it has other bytes than when the wheel was split; copy it again")
    wheel, library = folder / "nccl.whl", folder / "libnccl.so.2"
    wheel.write_bytes(b"".join(parts))
    if _digest(wheel.read_bytes()) != listed["wheel"]:
        raise PiecesError("the pieces together are another file than the wheel; split it again")
    with zipfile.ZipFile(wheel) as files:
        if LIBRARY not in files.namelist():
            raise PiecesError(f"the wheel has no {LIBRARY}; give one of nvidia-nccl-cu12 or nvidia-nccl-cu13")
        library.write_bytes(files.read(LIBRARY))
    wheel.unlink()
    return library


def version_of(library: Path) -> str:
    """The version of an NCCL, which this process loads."""
    number = ctypes.c_int()
    ctypes.CDLL(str(library.resolve())).ncclGetVersion(ctypes.byref(number))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    splitting = commands.add_parser("split")
    splitting.add_argument("wheel", type=Path)
    splitting.add_argument("folder", type=Path)
    splitting.add_argument("--megabytes", type=int, default=60)
    commands.add_parser("join").add_argument("folder", type=Path)
    given = parser.parse_args(words)
    try:
        if given.command == "split":
            pieces = split(given.wheel, given.folder, given.megabytes * 10**6)
            print(f"{len(pieces)} pieces and {MANIFEST} in {given.folder}")
        else:
            library = join(given.folder)
            print(f"{library}: NCCL {version_of(library)}")
    except (PiecesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
