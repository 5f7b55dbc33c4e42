"""How much memory a process needs to load its stage of a large checkpoint, and how long it takes.

Writes a Llama of about 400 million parameters into a temporary directory, in one file and in shards. Then a fresh
process for each stage loads its quarter, while a thread watches the process's anonymous memory (RssAnon: what the
process itself allocated; pages of mapped files can be dropped and do not count). Needs about 4 GB of disk; Linux only.

    python scripts/bench_loading.py [--stages 4] [--json FILE]

With --digests it measures what checking the digests costs: one process loads all of a Llama of about 300 million
parameters, in turn with the digests and without them, and the medians of the seconds are compared.

    python scripts/bench_loading.py --digests 7

With --quantised the weights of a Llama of 0.8 billion parameters in bfloat16 are quantised while they are read, and
then loaded from a checkpoint that is quantised already. The own bytes are those that the planner counts.

    python scripts/bench_loading.py --quantised nf4 --stages 2
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import torch
from bench.machine import status_bytes
from bench.models import llama, quantisation
from bench.processes import run_job
from bench.report import MEGABYTE, Spread, table, write_json
from bench.runner import parser
from transformers import AutoConfig, LlamaForCausalLM

from hf_gpipe import Pipeline
from hf_gpipe.adapters import adapter_for
from hf_gpipe.checkpoint.digests import DIGESTS_FILE
from hf_gpipe.model.assembly import assemble
from hf_gpipe.partition import partition
from hf_gpipe.planner.costs.layers import ModelLayers


def write_model(directory: Path, shard_size: str, num_layers: int = 26) -> None:
    """A Llama with random weights."""
    config = llama(1024, num_layers, 32000, 2816)
    LlamaForCausalLM(config).save_pretrained(directory, max_shard_size=shard_size)


def write_quantised(directory: Path, kind: str) -> tuple[Path, Path]:
    """A larger Llama in bfloat16, and the same one quantised."""
    config = llama(2048, 16, 4000, 5632, heads=16, dtype=torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(directory / "plain", max_shard_size="300MB")
    torch.set_default_dtype(torch.float32)
    model = LlamaForCausalLM.from_pretrained(directory / "plain", quantization_config=quantisation(kind))
    model.save_pretrained(directory / "quantised", max_shard_size="100MB")
    return directory / "plain", directory / "quantised"


def measure(directory: Path, stage: int, num_stages: int, kind: str | None = None) -> dict[str, float]:
    """Load one stage in a fresh process: its own bytes, the peak above the baseline after imports, seconds."""
    if kind is not None:
        import bitsandbytes  # noqa: F401  # importing it belongs to the baseline
    config, cpu = AutoConfig.from_pretrained(directory), torch.device("cpu")
    given = None if kind is None or hasattr(config, "quantization_config") else quantisation(kind)
    baseline = peak = status_bytes("RssAnon")
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, status_bytes("RssAnon"))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    adapter = adapter_for(config, config.dtype or torch.float32, quantization_config=given)
    layers = partition(len(adapter.layers), num_stages, "count")[stage]
    assemble(adapter, layers, directory, cpu)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    sizes = ModelLayers(adapter).own
    own = sum(sizes[layer].num_bytes for layer in layers)
    return {"own_bytes": own, "peak_bytes": peak - baseline, "seconds": seconds}


def compare(folder: Path, pairs: int) -> None:
    """Load the same files with and without digests, in turn, after one load that brings them into memory."""
    write_model(folder / "plain", "100GB", num_layers=18)
    Pipeline(folder / "plain", 2).save_pretrained(folder / "model")
    digests = folder / "model" / DIGESTS_FILE
    kept = digests.read_bytes()
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(2 * pairs + 1):
        how = "without" if number % 2 else "with"
        digests.unlink(missing_ok=True)
        if how == "with":
            digests.write_bytes(kept)
        (result,) = run_job(measure, (folder / "model", 0, 1), 1)
        if number:
            seconds[how].append(result["seconds"])
    spreads = {how: Spread.of(own) for how, own in seconds.items()}
    for how, spread in spreads.items():
        print(f"{how:>8} digests: median {spread.median:.3f} s, {spread.low:.3f} to {spread.high:.3f}")
    print(f"ratio {spreads['with'].median / spreads['without'].median:.3f}")


def main() -> None:
    made = parser(__doc__, stages=4)
    made.add_argument("--digests", type=int, metavar="PAIRS", help="measure the cost of digests with so many pairs")
    made.add_argument("--quantised", metavar="KIND", help="nf4, fp4, with + for double quantisation, or int8")
    made.add_argument("--json", type=Path, help="where to write the figures")
    options = made.parse_args()
    rows, cells = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.digests:
            return compare(folder, options.digests)
        if options.quantised:
            directories = write_quantised(folder, options.quantised)
        else:
            directories = (folder / "one", folder / "shards")
            for directory, shard_size in zip(directories, ("100GB", "300MB"), strict=True):
                write_model(directory, shard_size)
        for directory in directories:
            files = len(list(directory.glob("*.safetensors")))
            for stage in range(options.stages):
                (row,) = run_job(measure, (directory, stage, options.stages, options.quantised), 1)
                rows.append({"files": files, "stage": stage} | row)
                own, peak = row["own_bytes"] / MEGABYTE, row["peak_bytes"] / MEGABYTE
                sizes = (f"{own:.1f}", f"{peak:.1f}", f"{peak / own:.2f}")
                cells.append([files, stage, *sizes, f"{row['seconds']:.2f}"])
    print(table(["files", "stage", "own MB", "peak MB", "ratio", "seconds"], cells))
    write_json(options.json, rows=rows)
    return None


if __name__ == "__main__":
    main()
