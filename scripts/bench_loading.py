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

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

MEGABYTE = 1e6


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def write_model(directory: Path, shard_size: str, num_layers: int = 26) -> None:
    """A Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory, max_shard_size=shard_size)


def write_quantised(directory: Path, kind: str) -> tuple[Path, Path]:
    """A larger Llama in bfloat16, and the same one quantised."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=16,
        num_attention_heads=16,
        dtype=torch.bfloat16,
    )
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(directory / "plain", max_shard_size="300MB")
    torch.set_default_dtype(torch.float32)
    model = LlamaForCausalLM.from_pretrained(directory / "plain", quantization_config=quantisation(kind))
    model.save_pretrained(directory / "quantised", max_shard_size="100MB")
    return directory / "plain", directory / "quantised"


def quantisation(kind: str, compute_dtype: str = "bfloat16") -> Any:
    """nf4, fp4 (with a + for double quantisation) or int8."""
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind.removesuffix("+"),
        bnb_4bit_use_double_quant=kind.endswith("+"),
        bnb_4bit_compute_dtype=compute_dtype,
    )


def measure(directory: Path, stage: int, num_stages: int, kind: str | None) -> dict[str, float]:
    """Load one stage in this process: its own bytes, the peak above the baseline after imports, seconds."""
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    from hf_gpipe.adapters import StageModel, adapter_for
    from hf_gpipe.checkpoint import hub
    from hf_gpipe.partition import partition
    from hf_gpipe.planner.layers import ModelLayers

    given = None
    if kind is not None:
        import bitsandbytes

        assert bitsandbytes is not None
        given = quantisation(kind)
    config = AutoConfig.from_pretrained(directory)
    if hasattr(config, "quantization_config"):
        given = None
    assert LlamaForCausalLM is not None  # importing the model's code belongs to the baseline
    baseline = peak = anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    adapter = adapter_for(config, config.dtype or torch.float32, quantization_config=given)
    layers = partition(len(adapter.layers), num_stages, "count")[stage]
    model = StageModel(adapter, layers[0], layers[-1] + 1)
    hub.load(model, directory, torch.device("cpu"), seed=0)
    model.seal(torch.device("cpu"))
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    sizes = ModelLayers(adapter).own
    own = sum(sizes[layer].num_bytes for layer in layers)
    return {"own_bytes": own, "peak_bytes": peak - baseline, "seconds": seconds}


def compare(pairs: int) -> None:
    """Load the same files with and without digests, in turn, after one load that brings them into memory."""
    from hf_gpipe import Pipeline
    from hf_gpipe.checkpoint.digests import DIGESTS_FILE

    with tempfile.TemporaryDirectory() as folder:
        plain, directory = Path(folder) / "plain", Path(folder) / "model"
        write_model(plain, "100GB", num_layers=18)
        Pipeline(plain, 2).save_pretrained(directory)
        kept = (directory / DIGESTS_FILE).read_bytes()
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * pairs + 1):
            with_digests = number % 2 == 0
            (directory / DIGESTS_FILE).unlink(missing_ok=True)
            if with_digests:
                (directory / DIGESTS_FILE).write_bytes(kept)
            command = [sys.executable, __file__, "--stages", "1", "--measure", str(directory), "0"]
            result = subprocess.run(command, capture_output=True, text=True, check=True)
            if number:
                seconds[with_digests].append(json.loads(result.stdout.splitlines()[-1])["seconds"])
    for with_digests, found in seconds.items():
        print(
            f"{'with' if with_digests else 'without':>8} digests: median {statistics.median(found):.3f} s, "
            f"{min(found):.3f} to {max(found):.3f}"
        )
    print(f"ratio {statistics.median(seconds[True]) / statistics.median(seconds[False]):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4, help="K: how many stages the model is cut into")
    parser.add_argument("--digests", type=int, metavar="PAIRS", help="measure the cost of digests with so many pairs")
    parser.add_argument("--quantised", metavar="KIND", help="nf4, fp4, with + for double quantisation, or int8")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--measure", nargs=2, metavar=("DIRECTORY", "STAGE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(
            json.dumps(
                measure(Path(arguments.measure[0]), int(arguments.measure[1]), arguments.stages, arguments.quantised)
            )
        )
        return
    if arguments.digests:
        compare(arguments.digests)
        return
    rows = []
    print(f"{'files':>6} {'stage':>5} {'own MB':>8} {'peak MB':>8} {'ratio':>6} {'seconds':>8}")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.quantised:
            directories = write_quantised(Path(folder), arguments.quantised)
        else:
            directories = (Path(folder) / "one", Path(folder) / "shards")
            for directory, shard_size in zip(directories, ("100GB", "300MB"), strict=True):
                write_model(directory, shard_size)
        for directory in directories:
            files = len(list(directory.glob("*.safetensors")))
            for stage in range(arguments.stages):
                command = [sys.executable, __file__, "--stages", str(arguments.stages)]
                command += ["--quantised", arguments.quantised] if arguments.quantised else []
                result = subprocess.run(
                    [*command, "--measure", str(directory), str(stage)], capture_output=True, text=True, check=True
                )
                row = {"files": files, "stage": stage} | json.loads(result.stdout.splitlines()[-1])
                rows.append(row)
                own, peak = row["own_bytes"] / MEGABYTE, row["peak_bytes"] / MEGABYTE
                print(f"{files:>6} {stage:>5} {own:>8.1f} {peak:>8.1f} {peak / own:>6.2f} {row['seconds']:>8.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
