"""A digest of a model's directory that costs little: it tells whether two processes were given the same model."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

from hf_gpipe.checkpoint.digests import DIGESTS_FILE
from hf_gpipe.errors import CheckpointError

#: Files that are read whole: a configuration, an index, digests of every tensor, the model's own code.
_WHOLE = ("*config.json", "*.index.json", "*.py", DIGESTS_FILE)
_WEIGHTS = "*.safetensors"
#: Of a file with weights the header is read, and so many blocks at equal distances: 1 MiB of a file of any size.
_NUM_BLOCKS, _BLOCK_BYTES = 256, 4096
#: A longer header is not one, as safetensors says too.
_MOST_HEADER_BYTES = 100_000_000


def digest_of_model(directory: Path) -> str:
    """A short digest of a model's files: their names, sizes, configuration, headers, and samples of the weights.

    Raises:
        CheckpointError: a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for path in sorted({path for pattern in (*_WHOLE, _WEIGHTS) for path in directory.glob(pattern)}):
            digest.update(f"{path.name} {path.stat().st_size} ".encode())
            digest.update(_samples(path) if path.match(_WEIGHTS) else path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"the model in {directory} cannot be read: {error}") from None
    return digest.hexdigest()[:16]


def _samples(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        samples = [file.read(min(length, _MOST_HEADER_BYTES))]
        distance = max(_BLOCK_BYTES, size // _NUM_BLOCKS)
        for start in range(file.tell(), size, distance):
            file.seek(start)
            samples.append(file.read(_BLOCK_BYTES))
    return b"".join(samples)
