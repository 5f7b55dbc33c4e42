"""Measures the memory that merging adapters takes, here and in peft, over a model that is larger and larger.

python scripts/merge_memory.py             models of 8, 16 and 32 layers, float32, shards of 32 MiB
python scripts/merge_memory.py 64          another number of layers

Each merge runs in a process of its own. The figures are the process's largest resident memory during the merge, above
that before it; mapped files count.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

LAYERS = (8, 16, 32)
SHARD_BYTES = 32 << 20
WAYS = ("hf_gpipe", "peft")


def prepare(folder: Path, num_layers: int) -> int:
    """Saves a llama and adapters on it; returns the bytes of the model."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000, hidden_size=512, intermediate_size=2048, num_hidden_layers=num_layers, num_attention_heads=8
    )
    model = LlamaForCausalLM(config)
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder / "base")
    options = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(LlamaForCausalLM.from_pretrained(folder / "base"), options).save_pretrained(folder / "adapters")
    return size


def resident(key: str) -> int:
    """A figure of this process's memory, in bytes: VmRSS or VmHWM, the largest since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def measure(way: str, folder: Path) -> int:
    """The memory of one merge in this process, in bytes."""
    from peft import AutoPeftModelForCausalLM
    from transformers.utils import logging

    from hf_gpipe.model.merging import merge
    from hf_gpipe.model.spec import ModelSpec

    logging.disable_progress_bar()
    spec = ModelSpec.of(str(folder / "base"), peft_config=folder / "adapters")
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    if way == "peft":
        AutoPeftModelForCausalLM.from_pretrained(folder / "adapters").merge_and_unload().save_pretrained(folder / way)
    else:
        merge(spec, folder / way, shard_bytes=SHARD_BYTES)
    return resident("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", type=int, default=LAYERS, help="of each model")
    # How this script starts the process of one merge.
    parser.add_argument("--one", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        way, folder = options.one
        print(measure(way, Path(folder)))
        return
    print(f"| layers | model | {' | '.join(WAYS)} |")
    for num_layers in options.layers:
        with tempfile.TemporaryDirectory() as name:
            size, figures = prepare(Path(name), num_layers), []
            for way in WAYS:
                done = subprocess.run([sys.executable, __file__, "--one", way, name], check=True, capture_output=True)
                figures.append(int(done.stdout))
        print(f"| {num_layers} | {' | '.join(f'{peak / 2**20:.0f} MiB' for peak in (size, *figures))} |", flush=True)


if __name__ == "__main__":
    main()
