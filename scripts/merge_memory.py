"""Measures the memory that merging adapters takes, here and in peft, over a model that is larger and larger.

python scripts/merge_memory.py             models of 8, 16 and 32 layers, float32, shards of 32 MiB
python scripts/merge_memory.py 64          another number of layers

Each merge runs in a process of its own. The figures are the process's largest resident memory during the merge, above
that before it; mapped files count.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench import machine
from bench.models import llama
from bench.processes import run_job
from bench.runner import parser
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from hf_gpipe.model.merging import merge
from hf_gpipe.model.spec import ModelSpec

LAYERS = (8, 16, 32)
SHARD_BYTES = 32 << 20
WAYS = ("hf_gpipe", "peft")


def prepare(folder: Path, num_layers: int) -> int:
    """Saves a llama and adapters on it; returns the bytes of the model."""
    model = LlamaForCausalLM(llama(512, num_layers, 8000))
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder / "base")
    options = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(LlamaForCausalLM.from_pretrained(folder / "base"), options).save_pretrained(folder / "adapters")
    return size


def measure(way: str, folder: Path) -> int:
    """The memory of one merge in this process, in bytes."""
    spec = ModelSpec.of(str(folder / "base"), peft_config=folder / "adapters")
    machine.reset_peak()
    before = machine.resident_bytes()
    if way == "peft":
        AutoPeftModelForCausalLM.from_pretrained(folder / "adapters").merge_and_unload().save_pretrained(folder / way)
    else:
        merge(spec, folder / way, shard_bytes=SHARD_BYTES)
    return machine.peak_bytes() - before


def main() -> None:
    made = parser(__doc__)
    made.add_argument("layers", nargs="*", type=int, default=LAYERS, help="of each model")
    print(f"| layers | model | {' | '.join(WAYS)} |")
    for num_layers in made.parse_args().layers:
        with tempfile.TemporaryDirectory() as name:
            sizes = [prepare(Path(name), num_layers)]
            for way in WAYS:
                sizes += run_job(measure, (way, Path(name)), 1)
        print(f"| {num_layers} | {' | '.join(f'{size / 2**20:.0f} MiB' for size in sizes)} |", flush=True)


if __name__ == "__main__":
    main()
