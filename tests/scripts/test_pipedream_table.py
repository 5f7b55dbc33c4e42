"""The models of PipeDream's evaluation, and the kinds of configuration that the partitioner finds for them."""

from __future__ import annotations

import pytest
from pipedream.models import Model, awd_lm, gnmt, resnet50, vgg16
from pipedream.partitioner import data_parallel, partition_cluster, plan_of
from pipedream_table import CONFIGURATIONS, cluster_of, configurations, holds, kind, megabytes_per_sample, plan, short


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        # torchvision's two, and the sums of the parameters in the profiles that PipeDream's authors published.
        (vgg16(), 138_357_544),
        (resnet50(), 25_557_032),
        (gnmt(8), 193_765_952),
        (gnmt(16), 277_717_568),
        # 24.2M with the tied decoder that AWD-LSTM's authors give, and 4M for one of its own.
        (awd_lm(), 28_221_600),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_models_have_their_published_sizes(model: Model, parameters: int) -> None:
    assert model.weight_bytes == 4 * parameters


def test_operations_are_those_that_are_known() -> None:
    """15.5 and 4.1 billion multiplications and additions an image."""
    for model, billions in ((vgg16(), 15.5), (resnet50(), 4.1)):
        assert sum(layer.flops for layer in model.layers) / 2e9 / model.batch == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("model", "cluster", "flat", "published", "replication"),
    [
        (vgg16(), "4x4@pipedream-a", True, False, "15-1"),
        (vgg16(), "2x8@pipedream-b", True, True, "15-1"),
        (resnet50(), "4x4@pipedream-a", True, False, "16"),
        (resnet50(), "4x4@pipedream-a", False, False, "16"),
        (resnet50(), "2x8@pipedream-b", True, False, "16"),
        (resnet50(), "2x8@pipedream-b", False, True, "16"),
        (gnmt(16), "1x4@pipedream-a", False, True, "4x1"),
        (gnmt(16), "4x4@pipedream-a", True, True, "16x1"),
        (gnmt(16), "4x4@pipedream-a", False, True, "14x1-2"),
        (gnmt(8), "1x4@pipedream-a", False, True, "4x1"),
        (gnmt(8), "2x8@pipedream-b", False, False, "16"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_published_configurations_are_found(
    model: Model, cluster: str, flat: bool, published: bool, replication: str
) -> None:
    assert short(plan(model, cluster_of(cluster, flat), published=published).replication) == replication


def test_vgg_keeps_its_linear_layers_on_one_gpu() -> None:
    """The published split: all convolutions on 15 GPUs, the three linear layers on the last."""
    found = plan(vgg16(), cluster_of("4x4@pipedream-a", is_flat=True))
    assert [len(stage.layers) for stage in found.stages] == [13, 3]
    assert kind(found) == "two stages"
    assert holds(vgg16(), cluster_of("4x4@pipedream-a", is_flat=True)) == "0.5 to 2"


def test_bytes_a_sample_order_as_in_figure_17() -> None:
    """Without data parallelism ResNet-50 sends more, the others far less."""
    cluster = cluster_of("1x4@pipedream-a", is_flat=False)
    for model in (vgg16(), gnmt(8), gnmt(16), resnet50()):
        alone = plan_of(data_parallel(len(model.layers), cluster), model.costs(), cluster)
        other = partition_cluster(model.costs(), cluster, published=True, one_stage=False)
        before, after = megabytes_per_sample(alone, model), megabytes_per_sample(other, model)
        assert before == pytest.approx(2 * 3 / 4 * model.weight_bytes / model.batch / 1e6)
        assert after > before if model.name == "ResNet-50" else after < 0.3 * before


def test_the_table_has_a_row_for_each_case() -> None:
    rows = configurations()
    assert len(rows) == 11
    assert all(len(row) == len(CONFIGURATIONS) for row in rows)
