"""Chains of modules: how their layers are found, what is refused with which message, files, dropout, and processes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForImageClassification

from hf_gpipe import LogitsLoss, Pipeline
from hf_gpipe.adapters.chain import Chain
from hf_gpipe.errors import CheckpointError, DataError, UnsupportedModelError, UserError
from hf_gpipe.runtime.cutting import split_rows
from tests.gloo import run_gloo
from tests.oracle import Batch, Result, assert_same, run_pipeline

#: What would be planned where an example is given, which takes longer than a step.
DECIDED: dict[str, Any] = {"schedule": "gpipe", "recompute": "stage", "partition": "count"}


class Block(nn.Module):
    """Attention over the tokens of a row that are not padding."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, dropout, batch_first=True)

    def forward(self, x: torch.Tensor, is_padding: torch.Tensor) -> tuple[torch.Tensor, None]:
        normed = self.norm(x)
        return x + self.attention(normed, normed, normed, key_padding_mask=is_padding, need_weights=False)[0], None


class Tagger(nn.Module):
    """Arithmetic and dropout between its layers, which are in a list, a mask that all read, and a tied head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(20, 8), nn.ModuleList(Block(8, dropout) for _ in range(3))
        self.dropout, self.act, self.head = nn.Dropout(dropout), nn.ReLU(inplace=True), nn.Linear(8, 20)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        is_padding = mask == 0
        x = self.dropout(self.embed(ids)) * 3
        for block in self.blocks:
            x, _ = block(self.act(x), is_padding)
        return self.head(self.act(x))


def tagged(rows: int = 5, length: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(0, 20, (2, rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    return {"ids": ids, "mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def tagger(dropout: float = 0.0) -> Tagger:
    torch.manual_seed(0)
    return Tagger(dropout).double()


def plain_step(model: nn.Module, batch: Batch, num_micro_batches: int) -> Result:
    count, value = int((batch["labels"] != -100).sum()), 0.0
    for rows in split_rows(batch, num_micro_batches):
        given = {name: tensor for name, tensor in rows.items() if name != "labels"}
        logits = model(**given) if len(given) > 1 else model(*given.values())
        loss = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum") / count
        loss.backward()
        value += loss.item()
    return Result(value, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
@pytest.mark.parametrize("num_stages", [2, 5])
def test_layers_are_found_by_running_the_module(num_stages: int, schedule: str) -> None:
    model, batch = tagger(), tagged()
    expected = plain_step(copy.deepcopy(model), batch, 3)
    pipe = Pipeline(model, num_stages, 3, example=batch, **DECIDED | {"schedule": schedule})
    names = [layer.name for layer in pipe.adapter.layers]
    assert names == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert pipe.adapter.layers[0].modules == ("embed", "dropout")
    assert_same(run_pipeline(pipe, batch), expected)
    longer = tagged(7, 9)
    model.zero_grad()
    assert_same(run_pipeline(pipe, longer), plain_step(copy.deepcopy(model), longer, 3))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_part_of_an_nn_sequential_may_stand_in_several_places(schedule: str) -> None:
    torch.manual_seed(0)
    act, twice = nn.ReLU(inplace=True), nn.Sequential(nn.Linear(8, 8), nn.GELU())
    model = nn.Sequential(nn.Linear(6, 8), act, twice, act, twice, nn.Unflatten(1, (1, 8)), nn.Linear(8, 20)).double()
    model[0].requires_grad_(False)
    batch = {"x": torch.randn(4, 6, dtype=torch.float64), "labels": torch.tensor([[3], [19], [-100], [0]])}
    expected = plain_step(copy.deepcopy(model), batch, 2)
    assert expected.gradients.keys() == {"2.0.weight", "2.0.bias", "6.weight", "6.bias"}
    pipe = Pipeline(model, 4, 2, schedule)
    assert_same(run_pipeline(pipe, batch), expected)
    assert not pipe.stages[1].trainable_inputs["hidden"], "nothing before it is trained"


def test_dropout_does_not_depend_on_the_stages() -> None:
    batch = tagged()
    results = [
        run_pipeline(
            Pipeline(tagger(0.5), stages, 2, seed=3, example=batch, **DECIDED | {"recompute": recompute}), batch
        )
        for stages, recompute in ((1, "none"), (3, "stage"), (5, "none"))
    ]
    assert abs(results[0].loss - plain_step(tagger(), batch, 2).loss) > 1e-3, "dropout is on"
    for other in results[1:]:
        assert_same(other, results[0])


def _train_and_save(directory: Path) -> None:
    model, batch = tagger(), tagged()
    expected = plain_step(copy.deepcopy(model), batch, 3)
    pipe = Pipeline(model, 2, 3, example=batch, **DECIDED | {"schedule": "1f1b"})
    assert_same(run_pipeline(pipe, batch), expected)
    pipe.save_pretrained(directory)
    model.zero_grad()
    assert_same(run_pipeline(Pipeline(model, 1, 3, replicas=2, example=batch, **DECIDED), batch), expected)


def test_two_processes(tmp_path: Path) -> None:
    run_gloo(_train_and_save, 2, tmp_path)
    saved = {name: t for file in tmp_path.glob("*.safetensors") for name, t in load_file(file).items()}
    model = tagger()
    assert model.state_dict().keys() - saved.keys() == {"head.weight"}, "it is the embedding's"
    state = model.state_dict()
    assert all(torch.equal(saved[name], state[name]) for name in saved)


def test_files(tmp_path: Path) -> None:
    batch = tagged()
    pipe = Pipeline(tagger(), 3, 2, example=batch, **DECIDED)
    before = pipe.eval_step(batch).loss
    pipe.save_pretrained(tmp_path)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    assert pipe.eval_step(batch).loss != before
    pipe.load_pretrained(tmp_path)
    assert pipe.eval_step(batch).loss == before
    with pytest.raises(CheckpointError, match=r"has no 0.weight with the shape \(2, 2\)"):
        Pipeline(nn.Sequential(nn.Linear(2, 2)), 1).load_pretrained(tmp_path)


IMAGES: dict[str, dict[str, Any]] = {
    "vit": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    "convnextv2": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1], "drop_path_rate": 0.0},
    "swin": {"embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4, "drop_path_rate": 0.0},
}


@pytest.mark.parametrize("family", IMAGES)
def test_image_classifiers_of_transformers(family: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family, image_size=32, patch_size=4, num_labels=3, **IMAGES[family])
    torch.manual_seed(0)
    model = AutoModelForImageClassification.from_config(config).double().train()
    batch = {"pixel_values": torch.randn(5, 3, 32, 32, dtype=torch.float64), "labels": torch.tensor([0, 2, 1, 1, 0])}
    plain = copy.deepcopy(model)
    (loss := plain(**batch).loss).backward()
    expected = Result(loss.item(), {n: p.grad for n, p in plain.named_parameters() if p.grad is not None})
    pipe = Pipeline(model, 3, 2, example=batch, **DECIDED)
    assert_same(run_pipeline(pipe, batch), expected)
    pipe.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path, dtype=torch.float64)
    state = loaded.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in plain.state_dict().items())
    with torch.no_grad():
        next(pipe.parameters()).zero_()
    pipe.load_pretrained(tmp_path)
    assert pipe.eval_step(batch).loss == pytest.approx(expected.loss, rel=1e-10)


def test_labels_of_image_classifiers() -> None:
    """As transformers' problem_type says; soft labels need a loss of one's own."""
    pixels = torch.randn(4, 3, 32, 32)

    def made(problem_type: str | None, labels: torch.Tensor, **options: Any) -> Pipeline:
        config = AutoConfig.for_model("vit", image_size=32, patch_size=16, num_labels=3, **IMAGES["vit"])
        config.problem_type = problem_type
        model, batch = AutoModelForImageClassification.from_config(config), {"pixel_values": pixels, "labels": labels}
        return Pipeline(model, 2, 2, example=batch, **DECIDED | options)

    classes, shares = torch.tensor([0, -100, 2, 1]), torch.rand(4, 3)
    of_one = made(None, classes)
    of_many = made("multi_label_classification", shares, partition="flops")
    of_one.train_step({"pixel_values": pixels, "labels": classes})
    of_many.train_step({"pixel_values": pixels, "labels": shares})
    for pipe, labels, message in (
        (of_one, [0, 1, 2, 3], "labels has 3, and the model has 3 classes, from 0; set num_labels, or correct it"),
        (of_one, [0, 1, 2, -1], "labels has -1, and the model has 3 classes"),
        (of_one, [[0, 1, 2]] * 4, r"\(2, 3\) and the type torch.int64; for single_label_.* they are integers \(B,\)"),
        (of_many, [[0, 1, 1]] * 4, "the type torch.int64; for multi_label_classification they are floats, 3 for"),
        (of_many, [0.0, 1.0, 0.5, 0.1], "for multi_label_classification they are floats, 3 for each row"),
    ):
        with pytest.raises(DataError, match=message):
            pipe.train_step({"pixel_values": pixels, "labels": torch.tensor(labels)})
    with pytest.raises(DataError, match="for regression they are floats, 3 for each row"):
        made("regression", classes, partition="flops")

    def soft(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch

    of_soft = made(None, shares, loss=LogitsLoss(soft))
    of_soft.train_step({"pixel_values": pixels, "labels": shares})


class Skips(Tagger):
    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        embedded = x = self.embed(ids)
        for block in self.blocks:
            x, _ = block(x, mask == 0)
        return self.head(x + embedded)


class Hides(Tagger):
    """Its layers read what the first one has made without any operation on a tensor that depends on a weight."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x, _ = block(x, (x.detach()[..., 0] > 99) | (mask == 0))
        return self.head(x)


class ReadsAWeight(Tagger):
    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.linear(self.embed(ids), self.embed.weight)


class Returns(Tagger):
    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        return {"scores": super().forward(ids, mask)}


class ReadsAValue(Tagger):
    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(ids[:, : int(mask.sum(1).max())], mask)


class ChangesAnInput(Tagger):
    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(ids, mask.logical_not_())


class InPlace(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2))


class Counts(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Bare(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Skips, r"'blocks.2' reads a tensor \(5, 6, 8\) of float32 of 'embed', which is not of the layer before it"),
        (Hides, r"'blocks.0' reads a tensor \(5, 6\) of bool of 'embed', which is not of the layer before it"),
        (ReadsAWeight, "after 'embed' its forward reads 'embed.weight' outside of the module that has it"),
        (Returns, "returns a dict; it must return a tensor"),
        (ReadsAValue, r"cannot be run on the meta device.*may read no values of tensors \(item, nonzero\)"),
        (Bare, "the parameter 'scale' of Bare is in none of the modules"),
        (lambda: nn.Sequential(nn.ReLU()), "has no layers"),
        (ChangesAnInput, "changes 'mask' of a mini-batch in place"),
    ],
)
def test_what_is_no_chain(model: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Pipeline(model(), 2, example=tagged())


def test_shapes_and_keys_of_mini_batches() -> None:
    rows = {"x": torch.randn(3, 2), "labels": torch.tensor([0, 1, 1])}
    pipe = Pipeline(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)), 2, 2)
    with pytest.raises(DataError, match=r"needs labels and what the model reads; found \['x'\]"):
        pipe.train_step({"x": rows["x"]})
    with pytest.raises(DataError, match=r"the batch has .x., which Sequential.forward does not take"):
        pipe.train_step({**rows, "y": rows["x"]})
    with pytest.raises(DataError, match=r"cannot be run on the meta device.*\(2, 3\)"):
        pipe.train_step({"x": torch.randn(3, 3), "labels": rows["labels"]})
    for labels in (torch.randn(3, 2), torch.ones(3, dtype=torch.bool)):
        with pytest.raises(DataError, match=f"labels have the type {labels.dtype}, and the loss needs classes"):
            pipe.train_step({**rows, "labels": labels})
    for labels, message in (
        ([0, 2, 1], "labels has 2, and the model has 2 classes, from 0; let the last layer make more, or correct it"),
        ([0, -1, -100], "labels has -1, and the model has 2 classes"),
        ([[0, 1]] * 3, r"labels have the shape \(3, 2\), and Sequential makes logits \(3, 2\).*have the shape \(3,\)"),
    ):
        # In two micro-batches and in one.
        for count in (2, 1):
            one = Pipeline(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)), 2, count)
            with pytest.raises(DataError, match=message.replace("3", "[23]")):
                one.train_step({**rows, "labels": torch.tensor(labels)})
    of_logits = LogitsLoss(lambda outputs, labels, num_items_in_batch: (outputs.logits * labels).sum())
    Pipeline(nn.Sequential(nn.Linear(2, 2)), 1, loss=of_logits).train_step(
        {**rows, "labels": torch.tensor([[7, -1]] * 3)}
    )
    with pytest.raises(UnsupportedModelError, match=r"Sequential changes its buffer .1.calls."):
        Pipeline(nn.Sequential(nn.Linear(2, 2), Counts()), 2).train_step(rows)
    with pytest.raises(UnsupportedModelError, match="changes in place what '1' receives"):
        Pipeline(nn.Sequential(nn.Linear(2, 2), InPlace(2, 2)), 2).train_step(rows)
    with pytest.raises(UserError, match=r"give example=, a mini-batch, or make it an nn.Sequential"):
        Pipeline(tagger(), 2)
    with pytest.raises(UserError, match="peft_config is for models that read text"):
        Pipeline(nn.Sequential(nn.Linear(2, 2)), 1, peft_config=object())
    with pytest.raises(UserError, match="packing=True: Sequential is no Hugging Face model"):
        Pipeline(nn.Sequential(nn.Linear(2, 2)), 1, packing=True)
    with pytest.raises(UserError, match="the planner needs the shape of a mini-batch"):
        Pipeline(nn.Sequential(nn.Linear(2, 2)), 1, "auto")
    with pytest.raises(UserError, match="generate: Sequential is no Hugging Face model"):
        pipe.generate(input_ids=rows["labels"])


def test_shapes_are_observed_once_for_each_shape() -> None:
    chain = Chain(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)))
    for _ in range(3):
        for rows in (2, 3):
            inputs = {"x": torch.randn(rows, 2), "labels": torch.zeros(rows)}
            assert chain.carry_shapes(1, inputs) == {"hidden": (rows, 4)}
    assert chain.observations.count == 2


def test_sizes_on_a_line_are_read_off() -> None:
    chain = Chain(nn.Sequential(nn.Conv1d(1, 2, 3), nn.Conv1d(2, 2, 2, padding=2), nn.Conv1d(2, 1, 2)))
    strided = Chain(nn.Sequential(nn.Conv1d(1, 2, 3, stride=2), nn.Conv1d(2, 1, 2)))
    for number, (rows, length) in enumerate([(2, 9), (2, 11), (3, 11), (3, 13), (7, 30), (1, 300), (5, 12)]):
        x = torch.randn(rows, 1, length)
        for one in (chain, strided):
            for boundary in range(1, len(one.layers)):
                expected = (rows, 2, *chain_length(one, boundary, length))
                assert one.carry_shapes(boundary, {"x": x})["hidden"] == expected, (number, boundary)
    assert chain.observations.count == 4, "rank 3, and one more"
    assert strided.observations.count == 7, "of 12 columns a line would give half of one"


def chain_length(chain: Chain, boundary: int, length: int) -> tuple[int, ...]:
    return tuple(nn.Sequential(*list(chain.reference)[:boundary])(torch.empty(1, 1, length, device="meta")).shape[2:])
