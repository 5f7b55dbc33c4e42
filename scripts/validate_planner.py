"""Compares what the planner predicts with what runs here, and writes the table into docs/planner_validation.md.

    python scripts/validate_planner.py                  all cases, the table is written
    python scripts/validate_planner.py llama-1f1b ...   these only, nothing is written
    python scripts/validate_planner.py --tiny           small models: does the script work?

Each case is run three times, in fresh processes joined by gloo, each with one thread:

1. All processes measure one layer of each kind at the same time.
2. They train, for the median time of a step, with clipping and the optimizer's update, and for the bytes of the
   parameters that they hold.
3. They train two steps for the peak of their resident memory, above what it was after the imports and some steps of a
   tiny model, which bring in the libraries' own pages. Freed tensors return to the system at once, for which such
   processes are slower. The peak is compared with the plan without the reserve.

The planner is told the seconds of the layers, nothing else of the run. Where weights visit, the device and the host are
one memory here, so the bytes of such a case say nothing and are not shown. Run it while the machine does nothing else,
on at least two cores. No case has more processes than two: where processes share a core, one that waits makes the
others faster than they were when all measured, and a plan does not know that.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import transformers
from bench import machine
from bench.models import llama
from bench.planned import CPU, Case, planned, profile, tiny, train_pipeline
from bench.processes import run_job
from bench.report import table
from pages import block, write
from transformers import AutoModelForCausalLM, BartConfig, GPT2Config, MarianConfig, MT5Config, T5Config

from hf_gpipe.adapters.modules.quantised import size_of_quantised
from hf_gpipe.planner.costs.measure import this_machine
from hf_gpipe.planner.plan import Plan, ProcessPlan
from hf_gpipe.schedule import replicas_of

PAGE = Path(__file__).parents[1] / "docs" / "planner_validation.md"
HEADER = [
    *("case", "parameters", "K / processes", "M", "schedule", "recompute", "also"),
    *("peak a process, GiB: predicted / measured", "step, s: predicted / measured"),
]
VOCABULARY = 32000
TOLERANCE = 0.1
#: Of glibc's allocator: the bytes of a tensor from which on it is returned when it is freed.
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}


def cases() -> list[Case]:
    """Both kinds of models, K of 1, 2 and more stages than processes, every schedule, every mode, and replicas.

    Uneven replicas share their processes with other stages, so that two processes are enough.
    """
    wide = {"d_model": 640, "encoder_ffn_dim": 2560, "decoder_ffn_dim": 2560}
    heads = {"encoder_attention_heads": 10, "decoder_attention_heads": 10}
    blocks = {"encoder_layers": 4, "decoder_layers": 4, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
    seq2seq = {"vocab_size": VOCABULARY, "max_position_embeddings": 512, **wide, **heads, **blocks}
    tokens = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "decoder_start_token_id": 0}
    t5 = {"vocab_size": VOCABULARY, "d_kv": 64, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    llama_config = llama(640, 6, VOCABULARY, 1792, heads=10, pad_token_id=0)
    gpt2 = GPT2Config(
        vocab_size=VOCABULARY, n_embd=768, n_layer=6, n_head=12, n_positions=512, bos_token_id=1, eos_token_id=1
    )
    t5_small = T5Config(**t5, d_model=640, d_ff=2560, num_heads=10, num_layers=4, num_decoder_layers=4)
    # With mT5's own random weights the logits lie so far apart that their exponentials are subnormal numbers, for which
    # a CPU takes twenty times as long; those of trained weights do not.
    mt5_sizes = {"d_model": 512, "d_ff": 1792, "num_heads": 8, "num_layers": 6, "num_decoder_layers": 6}
    mt5 = MT5Config(**t5, **mt5_sizes, initializer_factor=0.05)
    visits = (llama_config, 8, 128, 128, 6, 2, 4)
    bart = BartConfig(**seq2seq, **tokens, forced_eos_token_id=None)
    return [
        Case("llama-plain", llama_config, 4, 128, 128, 1, 1, 2, "gpipe", "none"),
        Case("llama-gpipe", llama_config, 8, 128, 128, 2, 2, 4, "gpipe", "stage"),
        Case("gpt2-1f1b", gpt2, 8, 128, 128, 2, 2, 4, "1f1b", "none"),
        Case("gpt2-interleaved", gpt2, 8, 128, 128, 4, 2, 4, "interleaved_1f1b", "block"),
        Case("t5-gpipe", t5_small, 8, 96, 96, 2, 2, 4, "gpipe", "block"),
        Case("mt5-fused", mt5, 8, 96, 96, 2, 2, 4, "gpipe_fused", "stage"),
        Case("bart-naive", bart, 8, 96, 96, 2, 2, 2, "naive", "none"),
        Case("marian-stages", MarianConfig(**seq2seq, **tokens), 8, 96, 96, 2, 1, 4, "1f1b", "stage"),
        Case("llama-replicas", llama_config, 8, 128, 128, 1, 2, 4, "gpipe", "none", 2),
        Case("llama-zero", llama_config, 8, 128, 128, 1, 2, 4, "gpipe", "none", 2, 1),
        Case("gpt2-uneven", gpt2, 8, 128, 128, 2, 2, 4, "1f1b", "none", (1, 2), 0, "0 0,1"),
        Case("gpt2-uneven-zero", gpt2, 8, 128, 128, 2, 2, 4, "1f1b", "stage", (2, 1), 1, "0,1 1"),
        Case("llama-chunks", llama_config, 2, 1024, 1024, 2, 2, 2, "1f1b", "stage", sequence_chunks=4),
        Case("llama-zero-bubble", llama_config, 8, 128, 128, 2, 2, 4, "zb_h1", "none"),
        Case("llama-windows", llama_config, 8, 128, 128, 2, 2, 4, "pipedream", "none"),
        Case("llama-vocabulary", llama_config, 8, 128, 128, 2, 2, 4, "vocab_1f1b", "none"),
        Case("llama-tensor", llama_config, 8, 128, 128, 1, 2, 2, "gpipe", "none", others={"tensor_parallel": 2}),
        Case("llama-packed", llama_config, 16, 128, 128, 2, 2, 4, "1f1b", "none", training="packed"),
        Case("llama-bf16", llama_config, 8, 128, 128, 2, 2, 4, "1f1b", "none", training="bf16"),
        Case("llama-dpo", llama_config, 8, 128, 128, 2, 2, 4, "1f1b", "none", training="dpo"),
        Case("llama-qlora", llama_config, 8, 128, 128, 2, 2, 4, "1f1b", "none", training="qlora"),
        Case("llama-visits", *visits, "breadth_first", "stage", training="lora", others={"offload_weights": "frozen"}),
        Case("llama-dealt", *visits, "round_robin", "stage", others={"offload_weights": "all"}),
    ]


class Measured(NamedTuple):
    """The measurements of one process."""

    parameter_bytes: int
    step_seconds: tuple[float, ...]
    peak_bytes: int


def train(case: Case, num_steps: int) -> tuple[int, tuple[float, ...]]:
    """The bytes of the parameters of one process of a case, and the seconds of its steps."""
    pipe, seconds = train_pipeline(case, num_steps)
    tensors = [p for stage in pipe.models.values() for p in stage.parameters.values()]
    held = {p.data_ptr(): size_of_quantised(p)[1] for p in tensors}
    return sum(held.values()), seconds


def peak(case: Case) -> int:
    """The most bytes that two steps of a case take in one of its processes."""
    train_pipeline(tiny(case), 3)
    machine.reset_peak()
    baseline = machine.resident_bytes()
    # What was read of the mapped files of a checkpoint counts for a moment.
    train_pipeline(case, 2, before_steps=machine.reset_peak)
    return machine.peak_bytes() - baseline


@dataclass(frozen=True)
class Result:
    """Predicted and measured values of a case."""

    case: Case
    plan: Plan
    measured: list[Measured]

    @property
    def predicted_parameters(self) -> list[int]:
        """Bytes that each process holds."""
        ranges = [(stage.layers.start, stage.layers.stop) for stage in self.plan.stages]
        own = [[ranges[stage] for stage in process.stages] for process in self.processes]
        return [self.plan.layout.sums.held_by(stages).num_bytes for stages in own]

    @property
    def has_exact_parameters(self) -> bool:
        """Whether each process holds as many bytes of them as predicted."""
        return [measured.parameter_bytes for measured in self.measured] == self.predicted_parameters

    @property
    def processes(self) -> list[ProcessPlan]:
        """Of each process its plan; those that share layers have the same."""
        return [process for process in self.plan.processes for _ in range(self.case.num_ranks)]

    @property
    def peak_ratios(self) -> list[float]:
        """Predicted over measured, of each process; of weights that visit none."""
        if self.case.weights_visit:
            return []
        pairs = zip(self.processes, self.measured, strict=True)
        return [process.memory.of_tensors / measured.peak_bytes for process, measured in pairs]

    @property
    def step_seconds(self) -> float:
        """Measured: the median of the steps, each as long as its slowest process."""
        return median(max(times) for times in zip(*(measured.step_seconds for measured in self.measured), strict=True))

    @property
    def step_ratio(self) -> float:
        """Predicted over measured."""
        return self.plan.step_seconds / self.step_seconds


def validate(case: Case, num_steps: int) -> Result:
    """Measure the layers, predict, run."""
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-validation-") as folder:
        if case.reads_files:
            AutoModelForCausalLM.from_config(case.config).save_pretrained(folder)
            case = replace(case, folder=folder)
        measured = run_job(profile, (case,), case.num_processes)
        plan = planned(measured, case, this_machine(CPU))
        trained = run_job(train, (case, num_steps), case.num_processes, timeout_seconds=3600)
        peaks = run_job(peak, (case,), case.num_processes, timeout_seconds=3600, variables=RETURN_FREED)
        return Result(case, plan, [Measured(*own, of_peak) for own, of_peak in zip(trained, peaks, strict=True)])


def report(results: Sequence[Result]) -> str:
    """The section of the page."""
    rows = []
    for result in results:
        case = result.case
        peaks = "; ".join(
            f"{_gib(process.memory.of_tensors)} / {_gib(measured.peak_bytes)} = {ratio:.2f}"
            for process, measured, ratio in zip(result.processes, result.measured, result.peak_ratios, strict=False)
        )
        if not result.has_exact_parameters and not case.weights_visit:
            held = [measured.parameter_bytes for measured in result.measured]
            peaks += f"; parameters {result.predicted_parameters} against {held} bytes"
        rows.append(
            [
                *(case.name, f"{result.plan.costs.total.count / 1e6:.1f}M"),
                *(f"{case.num_stages} / {case.num_processes}", case.num_micro_batches),
                *(case.schedule, case.recompute, _modes(case), peaks),
                f"{result.plan.step_seconds:.2f} / {result.step_seconds:.2f} = {result.step_ratio:.2f}",
            ]
        )
    on_device = [result for result in results if not result.case.weights_visit]
    peaks_within = sum(all(_is_near(ratio) for ratio in result.peak_ratios) for result in on_device)
    exact_count = sum(result.has_exact_parameters for result in on_device)
    times_within = sum(_is_near(result.step_ratio) for result in results)
    return (
        f"{table(HEADER, rows)}\n\n"
        f"Of {len(on_device)} cases the parameters' bytes are exact in {exact_count} and the peak of each process is "
        f"within {TOLERANCE:.0%} in {peaks_within}. Of {len(results)} the step's time is within {TOLERANCE:.0%} in "
        f"{times_within} (median ratio {median(result.step_ratio for result in results):.2f}).\n\n"
        f"Measured on {platform.machine()} with {os.cpu_count()} cores, one thread a process, load "
        f"{os.getloadavg()[2]:.1f} over the last 15 minutes; Python {platform.python_version()}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}. Weights in float32, and but for bf16 "
        "arithmetic too; AdamW."
    )


def _modes(case: Case) -> str:
    """Of a case what most cases do not have: replicas of each stage, chunks, and another kind of training."""
    counts = replicas_of(case.num_stages, case.replicas)
    modes = ["replicas " + "-".join(map(str, counts))] if max(counts) > 1 else []
    modes += ["zero 1"] * case.zero + [f"{case.sequence_chunks} chunks"] * (case.sequence_chunks > 1)
    return ", ".join(modes + [case.training] * (case.training != "full"))


def _is_near(ratio: float) -> bool:
    return abs(ratio - 1) <= TOLERANCE


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names of cases; none: all, and the page is written")
    parser.add_argument("--steps", type=int, default=7, help="steps of a run; the first is not counted")
    parser.add_argument("--tiny", action="store_true", help="small models, nothing is written")
    options = parser.parse_args(arguments)
    everything = cases()
    if unknown := set(options.cases) - {case.name for case in everything}:
        parser.error(f"no case {sorted(unknown)[0]!r}; there are {', '.join(case.name for case in everything)}")
    chosen = [case for case in everything if not options.cases or case.name in options.cases]
    results = []
    for case in chosen:
        results.append(validate(tiny(case) if options.tiny else case, options.steps))
        print(report(results[-1:]).splitlines()[2], flush=True)
    section = report(results)
    print(section)
    if not options.cases and not options.tiny:
        write(PAGE, {"validation": block(section)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
