"""Whether a model's files are read and written as transformers does: a tiny clone says so where that is not known."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from hf_gpipe.adapters import unsupported
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.checkpoint import digests, stage_weights, writer
from hf_gpipe.checkpoint.save import complete_model, write_configuration, write_shard
from hf_gpipe.errors import listed, one_line
from hf_gpipe.model.assembly import assemble
from hf_gpipe.model.clone import clone_of, compared_once
from hf_gpipe.partition import partition

_STAGES = 3


def verify_files(adapter: TextAdapter) -> None:
    """Save a tiny clone by transformers, read it in stages, save these, and read that by transformers, once for equal
    clones.

    Raises UnsupportedModelError unless every parameter and buffer has the same bits in the end, and on the way.
    """
    compared_once(adapter, "files", lambda: _compare(adapter))


def _compare(adapter: TextAdapter) -> bool:
    model, clone = clone_of(adapter, adapter.dtype if adapter.quantisation is None else torch.float32)
    expected, copies = model.state_dict(), model.all_tied_weights_keys
    try:
        with stage_weights.quiet(), TemporaryDirectory(prefix="hf_gpipe-") as folder:
            plain, ours = Path(folder) / "plain", Path(folder) / "ours"
            model.save_pretrained(plain)
            ours.mkdir()
            other = _through_stages(clone, plain, ours)
            read = (
                type(model)
                .from_pretrained(ours, dtype=model.dtype, trust_remote_code=adapter.blueprint.trust_remote_code)
                .state_dict()
            )
    except Exception as error:
        raise unsupported(
            adapter.given_config, f"a tiny clone in stages cannot be read or saved: {one_line(str(error), 200)}"
        ) from error
    own = {name: tensor for name, tensor in expected.items() if name not in copies}
    for what, wanted, state in (("reads", own, other), ("saves", expected, read)):
        if wrong := [n for n, tensor in wanted.items() if n not in state or not torch.equal(state[n], tensor)]:
            raise unsupported(adapter.given_config, f"a tiny clone in stages {what} {listed(wrong, 3)} otherwise")
    return True


def _through_stages(adapter: TextAdapter, source: Path, target: Path) -> dict[str, torch.Tensor]:
    """Read a model's stages, and write them into a directory: their parameters and saved buffers by name."""
    state: dict[str, torch.Tensor] = {}
    shards = {}
    cuts = partition(len(adapter.layers), min(_STAGES, len(adapter.layers)), "count")
    for number, layers in enumerate(cuts):
        stage = assemble(adapter, layers, str(source), torch.device("cpu"))
        tensors = {**stage.parameters, **stage.buffers}
        own = [name for name in tensors if name not in state]
        state |= {name: tensor.detach() for name, tensor in tensors.items()}
        if written := writer.in_hub_form(stage, writer.saved_tensors(stage, own)):
            name = f"model-{number + 1:05d}-of-{len(cuts):05d}.safetensors"
            shards[name] = write_shard(target / name, written)
    write_configuration(adapter, target)
    digests.write(target, complete_model(target, shards))
    return state
