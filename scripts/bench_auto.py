"""The cost of `num_micro_batches: auto`: the step of the M that the planner chooses, over that of the best M.

    python scripts/bench_auto.py                  five models of unlike sizes, about 25 minutes
    python scripts/bench_auto.py marian-small     these only
    python scripts/bench_auto.py --tiny           models of a few thousand weights: does the script work?

Two processes of one thread each train every model with 1f1b and every M that may be chosen, round after round. The
planner chooses from estimates by data-sheet rates (partition "auto"), and from measured layers ("profile").
Run it while the machine does nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from bench.models import llama
from bench.planned import Case, tiny, train_pipeline
from bench.processes import run_job
from bench.runner import parser
from transformers import GPT2Config, MarianConfig
from validate_planner import cases

from hf_gpipe import Pipeline
from hf_gpipe.planner.search.choose import micro_batch_counts


def models() -> list[Case]:
    """From a translation model of 5M parameters with short sentences to models of 60M with long rows."""
    named = {case.name: case for case in cases()}
    layers, heads, widths = (
        {f"{side}_{name}": value for side in ("encoder", "decoder")}
        for name, value in (("layers", 3), ("attention_heads", 4), ("ffn_dim", 512))
    )
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": None}
    sizes = {"vocab_size": 8000, "d_model": 256, "max_position_embeddings": 128}
    marian = MarianConfig(**sizes, **layers, **heads, **widths, **tokens)
    gpt2 = GPT2Config(vocab_size=8000, n_embd=256, n_layer=4, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=1)
    small = {"heads": 4, "pad_token_id": 0}
    return [
        Case("llama-tiny", llama(64, 4, 1000, 128, **small), 64, 16, 16, 2, 2, 1, "1f1b", "none"),
        Case("marian-small", marian, 64, 24, 24, 2, 2, 1, "1f1b", "none"),
        Case("gpt2-small", gpt2, 32, 64, 64, 2, 2, 1, "1f1b", "none"),
        *(replace(named[name], schedule="1f1b", recompute="none", rows=16) for name in ("t5-gpipe", "llama-gpipe")),
    ]


def sweep(case: Case, num_steps: int, rounds: int) -> tuple[dict[int, float], dict[str, int]]:
    """In each process: the median seconds of a step for each M, and the M that each kind of estimate chooses."""
    chosen, options = {}, {"device": "cpu", "example": case.batch()}
    for partition in ("auto", "profile"):
        pipe = Pipeline(case.config, case.num_stages, "auto", case.schedule, case.recompute, partition, **options)
        chosen[partition] = pipe.config.num_micro_batches
    seconds: dict[int, list[float]] = {count: [] for count in micro_batch_counts(case.rows, "auto")}
    for _ in range(rounds):
        for count, times in seconds.items():
            times += train_pipeline(replace(case, num_micro_batches=count), num_steps)[1]
    return {count: median(times) for count, times in seconds.items()}, chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """See the top of the file."""
    made = parser(__doc__, steps=6, rounds=3)
    made.add_argument("models", nargs="*", help="names of models; none: all")
    made.add_argument("--tiny", action="store_true", help="models of a few thousand weights, one round")
    options = made.parse_args(arguments)
    chosen = [case for case in models() if not options.models or case.name in options.models]
    if not chosen:
        made.error(f"no model is called so; there are {', '.join(case.name for case in models())}")
    print("| model | seconds of a step by M | best M | estimated: M, slower | profiled: M, slower |")
    print("|---|---|---:|---:|---:|")
    for case in chosen:
        own, rounds = (replace(tiny(case), rows=4), 1) if options.tiny else (case, options.rounds)
        results = run_job(sweep, (own, options.steps, rounds), own.num_processes, timeout_seconds=3600)
        seconds = {count: max(result[0][count] for result in results) for count in results[0][0]}
        best = min(seconds, key=lambda count: seconds[count])
        ratios = [f"{count}, {seconds[count] / seconds[best]:.3f}" for count in results[0][1].values()]
        shown = ", ".join(f"{count}: {time:.4g}" for count, time in seconds.items())
        print(f"| {case.name} | {shown} | {best} | {' | '.join(ratios)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
