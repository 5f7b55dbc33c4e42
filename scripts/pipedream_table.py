"""PipeDream's configurations, found again: python scripts/pipedream_table.py

For the models of PipeDream's evaluation, built from their public shapes (pipedream/models.py), the partitioner is run
on the paper's clusters A and B, as levels and as one flat level, with the published formula and with rings
(pipedream/partitioner.py). The column "paper" is Table 1 of SOSP 2019 as we know it; it was not checked against
the text. 15-1 for VGG-16, the straight pipelines of GNMT-16 and GNMT-8 on 4 GPUs and data parallelism for ResNet-50
are also in the authors' public code. For GNMT-16 on 16 GPUs it has 14 stages.

"holds" is the range of the V100's utilisation, around the assumed 0.65, in which the kind of configuration stays the
same. Utilisations above 1 are possible for 3x3 convolutions, where Winograd's algorithm needs fewer operations.
docs/partition.md discusses what differs.
"""

from __future__ import annotations

import sys
import time
from itertools import groupby, takewhile
from typing import Any

from bench.report import table
from pipedream.models import UTILISATION, Model, awd_lm, gnmt, resnet50, vgg16
from pipedream.partitioner import ClusterPlan, communicated_bytes, data_parallel, flat, partition_cluster, plan_of

from hf_gpipe.partition.cluster import Cluster, parse_cluster

LOWER, HIGHER = (0.5, 0.4, 0.3, 0.2), (0.8, 1.0, 1.3, 1.6, 2.0)


#: The rows of the paper's Table 1, not checked: model, cluster, configuration, speed-up over data parallelism.
CASES = (
    *((vgg16(), "4x4@pipedream-a", "15-1", 5.28), (vgg16(), "2x8@pipedream-b", "15-1", 2.98)),
    *((resnet50(), "4x4@pipedream-a", "16", 1.0), (resnet50(), "2x8@pipedream-b", "16", 1.0)),
    (gnmt(16), "1x4@pipedream-a", "straight", 1.46),
    *((gnmt(16), "4x4@pipedream-a", "straight", 2.34), (gnmt(16), "2x8@pipedream-b", "straight", 3.14)),
    *((gnmt(8), "1x4@pipedream-a", "straight", 1.5), (gnmt(8), "3x4@pipedream-a", "straight", 2.95)),
    *((gnmt(8), "2x8@pipedream-b", "16", 1.0), (awd_lm(), "1x4@pipedream-a", "straight", 4.25)),
)


def cluster_of(text: str, is_flat: bool) -> Cluster:
    """A single server is one level already."""
    cluster = parse_cluster(text)
    if cluster.levels[-1].parts == 1:
        cluster = Cluster(cluster.levels[:-1])
    return flat(cluster) if is_flat else cluster


def plan(model: Model, cluster: Cluster, *, published: bool = False, utilisation: float = UTILISATION) -> ClusterPlan:
    return partition_cluster(model.costs(utilisation), cluster, published=published)


def kind(cluster_plan: ClusterPlan) -> str:
    """Data parallel, straight, nearly straight (most stages have one worker), two stages, or hybrid."""
    replicas = [stage.replicas for stage in cluster_plan.stages]
    if len(replicas) == 1:
        return "data parallel"
    if set(replicas) == {1}:
        return "straight"
    if 2 * replicas.count(1) > len(replicas):
        return "nearly straight"
    return "two stages" if len(replicas) == 2 else "hybrid"


def holds(model: Model, cluster: Cluster) -> str:
    """The utilisations, from a coarse grid, between which the kind stays with rings."""
    own = kind(plan(model, cluster))
    ends = []
    for grid in (LOWER, HIGHER):
        same = takewhile(lambda utilisation: kind(plan(model, cluster, utilisation=utilisation)) == own, grid)
        ends.append([UTILISATION, *same][-1])
    return f"{ends[0]:g} to {ends[1]:g}"


def megabytes_per_sample(cluster_plan: ClusterPlan, model: Model) -> float:
    return communicated_bytes(cluster_plan.stages, model.costs()) / model.batch / 1e6


def alone(model: Model, cluster: Cluster) -> ClusterPlan:
    """Data parallelism."""
    return plan_of(data_parallel(len(model.layers), cluster), model.costs(), cluster)


def short(replication: str) -> str:
    """1-1-1-1-2 as 4x1-2."""
    groups = [(count, len(list(same))) for count, same in groupby(replication.split("-"))]
    return "-".join(f"{times}x{count}" if times > 2 else "-".join([count] * times) for count, times in groups)


CONFIGURATIONS = (
    *("model", "cluster", "paper, not checked", "speed-up", "formula on levels", "formula, flat", "rings on levels"),
    *("rings, flat", "speed-up, rings flat", "holds"),
)


def configurations() -> list[list[str]]:
    """The rows of the table of configurations: published formula and rings, on levels and flat."""
    rows = []
    for model, cluster, paper, speedup in CASES:
        one_level = cluster_of(cluster, is_flat=True)
        plans = [
            plan(model, cluster_of(cluster, is_flat), published=published)
            for published in (True, False)
            for is_flat in (False, True)
        ]
        ratio = alone(model, one_level).seconds / plans[-1].seconds
        name = cluster.replace("@pipedream-", " ").upper().replace("X", "x")
        found = [short(cluster_plan.replication) for cluster_plan in plans]
        rows.append([model.name, name, paper, f"{speedup:g}", *found, f"{ratio:.2f}", holds(model, one_level)])
    return rows


TRAFFIC = (
    *("model", "GPUs", "data parallel, MB/sample", "best other configuration", "MB/sample", "less by"),
    "the paper, not checked",
)


def traffic() -> list[list[Any]]:
    """Rows of bytes per sample on 4 GPUs of cluster A and on 16 GPUs taken as one level."""
    rows: list[list[Any]] = []
    said = {"ResNet-50": "more (figure 17)", "AWD LM": "88% less"}
    for model in (vgg16(), resnet50(), gnmt(8), gnmt(16), awd_lm()):
        for cluster in (cluster_of("1x4@pipedream-a", is_flat=False), cluster_of("4x4@pipedream-a", is_flat=True)):
            best = partition_cluster(model.costs(), cluster, published=True, one_stage=False)
            before = megabytes_per_sample(alone(model, cluster), model)
            after = megabytes_per_sample(best, model)
            paper = said.get(model.name, "far less (figure 17)") if cluster.num_devices == 4 else ""
            cells = f"{before:.2f}", short(best.replication), f"{after:.2f}", f"{1 - after / before:.0%}"
            rows.append([model.name, cluster.num_devices, *cells, paper])
    return rows


if __name__ == "__main__":
    began = time.perf_counter()
    print(table(CONFIGURATIONS, configurations()), "", table(TRAFFIC, traffic()), sep="\n")
    print(f"\n{time.perf_counter() - began:.1f} s", file=sys.stderr)
