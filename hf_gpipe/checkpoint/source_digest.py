"""A digest of a model's directory that costs little: it tells whether two processes were given the same model."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hf_gpipe.checkpoint.digests import DIGESTS_FILE, read_header
from hf_gpipe.errors import CheckpointError

#: Files that are read whole: a configuration, an index, digests of every tensor, the model's own code.
_WHOLE = ("*config.json", "*.index.json", "*.py", DIGESTS_FILE)
_WEIGHTS = "*.safetensors"
#: So many blocks of a file with weights are read beside its header, at equal distances: 1 MiB of any file.
_NUM_BLOCKS, _BLOCK_BYTES = 256, 4096


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
    size, samples = path.stat().st_size, [read_header(path)]
    with path.open("rb") as file:
        for start in range(len(samples[0]), size, max(_BLOCK_BYTES, size // _NUM_BLOCKS)):
            file.seek(start)
            samples.append(file.read(_BLOCK_BYTES))
    return b"".join(samples)
