"""A pipeline and data parallelism over slow links: seconds of a step beside the planner's, and bytes per row.

    python scripts/bench_hosts.py                      every link, about 5 minutes; needs root (emulated_hosts.py)
    python scripts/bench_hosts.py --links 1gbit        this one only
    python scripts/bench_hosts.py --tiny --steps 3     a small model: does the script work?

It is the question of GPipe's table 3 (scaling without NVLink). Two emulated machines of one process train the same
mini-batches of one model: as two stages, and as two replicas of the whole model. All processes measure the layers at
the same time, and the link between the machines is measured, as at the start of a run. The planner is told these, and
nothing else of the run. The bytes are those of the network interfaces, with the headers of their packets. Run it
while the machine does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import transformers
from bench.models import llama
from bench.planned import CPU, Case, planned, profile, tiny, train_pipeline
from bench.runner import parser as numbers_parser

from hf_gpipe.job.world import World
from hf_gpipe.planner.costs.measure import this_machine
from hf_gpipe.planner.machines.links import cluster_of, measure_machines
from hf_gpipe.planner.traffic import traffic
from scripts.emulated_hosts import Hosts, why_not

PORT = 29500
NUM_HOSTS = 2


class LinkLimit(NamedTuple):
    """The limit of the link between the machines: a rate as `tc` writes it, empty for no limit, and a delay."""

    name: str
    rate: str = ""
    delay_seconds: float = 0.0


LINKS = [
    LinkLimit("no limit"),
    LinkLimit("1gbit", "1gbit"),
    LinkLimit("100mbit", "100mbit"),
    # The program that delays packets carries 500 Mbit/s in all, too little for two directions at a greater rate.
    LinkLimit("100mbit+10ms", "100mbit", delay_seconds=0.01),
]


def cases() -> list[Case]:
    """One model as a pipeline of two stages, and whole in two replicas."""
    config = llama(512, 6, 8000, 1408, pad_token_id=0)
    pipeline = Case("pipeline", config, 16, 128, 128, NUM_HOSTS, NUM_HOSTS, 8, "1f1b", "none")
    return [pipeline, replace(pipeline, name="data parallelism", num_stages=1, replicas=NUM_HOSTS, num_micro_batches=4)]


# ---------------------------------------------------------------------- on the machines


def sent_bytes() -> int:
    """All that this machine has sent to others."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def measure(case: Case, num_steps: int) -> dict[str, Any]:
    """Predict a case and run it. Every machine calls it; the result is that of all."""
    everyone = World.current()
    measure_machines(everyone)
    device = this_machine(CPU)
    measured = everyone.gather_objects(profile(case))
    plan = planned(measured, case, device, cluster=cluster_of(everyone, device.link))
    sent: list[int] = []
    _, seconds = train_pipeline(case, num_steps + 1, lambda: sent.append(sent_bytes()))
    all_sent = sum(everyone.gather_objects(sent[-1] - sent[0]))
    level = plan.planner.cluster.levels[-1]
    return {
        "case": case.name,
        "bytes_per_second": level.bytes_per_second,
        "latency_seconds": level.latency_seconds,
        "predicted_seconds": plan.step_seconds,
        "seconds": median(max(times) for times in zip(*everyone.gather_objects(seconds), strict=True)),
        "predicted_bytes_per_row": traffic(plan).total,
        "bytes_per_row": all_sent / num_steps / case.rows,
        "tokens_per_step": case.rows * case.source,
    }


def work(options: argparse.Namespace) -> None:
    """One of the machines."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    chosen = [tiny(case) for case in cases()] if options.tiny else cases()
    results = [measure(case, options.steps) for case in chosen]
    if dist.get_rank() == 0:
        options.results.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


# ---------------------------------------------------------------------- around them


def run(link: LinkLimit, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The results of every case over a link."""
    with tempfile.TemporaryDirectory() as folder, Hosts(NUM_HOSTS) as hosts:
        if link.rate:
            hosts.limit_rate(link.rate)
        if link.delay_seconds:
            hosts.slow_down(1, link.delay_seconds, loss=0.0)
        results = Path(folder) / "results.json"
        words = [sys.executable, __file__, "--steps", str(options.steps), "--results", str(results)]
        words += ["--tiny"] * options.tiny
        running = []
        for number in range(NUM_HOSTS):
            places = {"RANK": number, "WORLD_SIZE": NUM_HOSTS, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": PORT}
            places |= {"MASTER_ADDR": hosts.addresses[0], "OMP_NUM_THREADS": 1}
            environment = {name: str(value) for name, value in places.items()}
            running.append(hosts.start(number, words, environment=environment))
        exit_codes = [process.wait() for process in running]
        if any(exit_codes):
            raise SystemExit(f"{link.name}: a machine failed; its message is above")
        return json.loads(results.read_text())


def row(link: LinkLimit, result: dict[str, Any]) -> str:
    """A line of the table."""
    ratio = result["predicted_seconds"] / result["seconds"]
    return (
        f"| {link.name} | {result['bytes_per_second'] * 8e-6:,.0f} Mbit/s, {result['latency_seconds'] * 1e3:.3g} ms | "
        f"{result['case']} | {result['predicted_seconds']:.2f} s / {result['seconds']:.2f} s = {ratio:.2f} | "
        f"{result['tokens_per_step'] / result['seconds']:,.0f} | {result['predicted_bytes_per_row'] / 1e6:.3g} MB / "
        f"{result['bytes_per_row'] / 1e6:.3g} MB |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """See the top of the file."""
    parser = numbers_parser(__doc__, steps=5)
    names = [link.name for link in LINKS]
    parser.add_argument("--links", nargs="+", choices=names, default=names)
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.results is not None:
        work(options)
        return 0
    if reason := why_not():
        print(f"no emulated machines: {reason}", file=sys.stderr)
        return 2
    os.environ["OMP_NUM_THREADS"] = "1"
    print("| link | measured | case | step: predicted / measured | tokens/s | bytes a row: predicted / sent |")
    print("|---|---|---|---|--:|---|")
    for link in LINKS:
        if link.name in options.links:
            for result in run(link, options):
                print(row(link, result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
