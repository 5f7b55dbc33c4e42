"""Several datasets, each with its loss: the mini-batches, losses and weights of sentence-transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

from hf_gpipe import EmbeddingLoss, Pipeline, PipelineEmbeddingConfig, PipelineEmbeddingTrainer
from hf_gpipe.data.batches import drawn_batches, mixed_batches
from hf_gpipe.data.embedding_examples import EmbeddingCollator, EmbeddingExamples
from hf_gpipe.errors import DisagreementError, UserError
from hf_gpipe.losses.embeddings import EmbeddingLosses
from tests.gloo import run_gloo
from tests.oracle import Result, assert_same, gathered_gradients
from tests.trainers.test_embeddings import NO_DROPOUT, ROWS, SMALL, expected_loss, words
from tests.training.toy import TWO_STAGES, Recorder, weights

SCORED = [
    {"first": row["anchor"], "second": row["negative"], "score": number / 20} for number, row in enumerate(ROWS[:10])
]
DATASETS = {"triplets": ROWS, "scored": SCORED}
LOSSES = {"triplets": EmbeddingLoss(), "scored": EmbeddingLoss("cosine")}


def model() -> BertModel:
    torch.manual_seed(0)
    made: BertModel = BertModel(
        BertConfig(**SMALL | {"vocab_size": len(words())}, **NO_DROPOUT, intermediate_size=32)
    ).double()
    return made


def arguments(folder: Path | str, **values: Any) -> PipelineEmbeddingConfig:
    common: dict[str, Any] = {
        **TWO_STAGES,
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 32,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
    }
    return PipelineEmbeddingConfig(output_dir=str(folder), **common | values)


def trainer(folder: Path | str, train: Any = DATASETS, loss: Any = LOSSES, **values: Any) -> PipelineEmbeddingTrainer:
    given = {name: values.pop(name) for name in ("eval_dataset", "data_collator") if name in values}
    return PipelineEmbeddingTrainer(
        model(),
        arguments(folder, **values),
        train_dataset=train,
        processing_class=words(),
        loss=loss,
        callbacks=[Recorder()],
        **given,
    )


def losses(made: PipelineEmbeddingTrainer) -> list[float]:
    return [line["loss"] for line in made.state.log_history if "loss" in line]


@pytest.mark.parametrize("sampler", ["proportional", "round_robin"])
def test_thirty_steps_of_sentence_transformers(sampler: str, tmp_path: Path) -> None:
    """Its own order of mini-batches, in several epochs, with prompts by dataset, and an evaluation of each dataset.

    It shuffles the rows of an evaluation too, so all of them are one mini-batch here.
    """
    library = pytest.importorskip("sentence_transformers")
    from datasets import Dataset, DatasetDict
    from sentence_transformers import losses as of_library
    from sentence_transformers.models import Pooling, Transformer

    model().save_pretrained(tmp_path / "start")
    words().save_pretrained(tmp_path / "start")
    transformer = Transformer(str(tmp_path / "start"), model_kwargs={"dtype": torch.float64})
    theirs = library.SentenceTransformer(modules=[transformer, Pooling(16, "mean")], device="cpu")
    prompts = {"triplets": {"anchor": "a b "}, "scored": "c "}
    common: dict[str, Any] = {"multi_dataset_batch_sampler": sampler, "prompts": prompts, "max_steps": 30}
    common |= {"eval_strategy": "steps", "eval_steps": 15}
    asked = arguments(tmp_path / "ours")
    same = ("per_device_train_batch_size", "per_device_eval_batch_size", "learning_rate", "lr_scheduler_type")
    common |= {name: getattr(asked, name) for name in (*same, "logging_steps", "save_strategy", "use_cpu")}
    datasets = {name: Dataset.from_list(rows) for name, rows in DATASETS.items()}
    recorder = Recorder()
    library.SentenceTransformerTrainer(
        model=theirs,
        args=library.SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path / "theirs"), report_to="none", disable_tqdm=True, **common
        ),
        train_dataset=DatasetDict(datasets),
        eval_dataset=DatasetDict(datasets),
        loss={
            "triplets": of_library.MultipleNegativesRankingLoss(theirs),
            "scored": of_library.CosineSimilarityLoss(theirs),
        },
        callbacks=[recorder],
    ).train()
    made = trainer(tmp_path / "ours", eval_dataset=DATASETS, **common)
    made.train()
    assert losses(made) == pytest.approx(recorder.losses, abs=1e-6, rel=0)
    assert len(recorder.losses) == 30
    for name in ("eval_triplets_loss", "eval_scored_loss"):
        expected = [line[name] for line in recorder.logs if name in line]
        found = [line[name] for line in made.state.log_history if name in line]
        assert found == pytest.approx(expected, abs=1e-6, rel=0)
        assert len(found) == 2
    parameters = {name.rpartition("model.")[2]: parameter for name, parameter in transformer.named_parameters()}
    for name, parameter in weights(made).items():
        torch.testing.assert_close(parameters[name], parameter, rtol=0, atol=1e-9, msg=name)


def test_the_order_of_mini_batches() -> None:
    """Each has rows of one dataset; all rows come once, or in turn, until the shortest dataset ends."""

    def drawn(sizes: tuple[int, ...], *, in_turn: bool, seed: int = 0) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        batches = [drawn_batches(size, 4, generator, drop_last=False) for size in sizes]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        return [*mixed_batches(batches, list(map(len, batches)), starts, generator, in_turn=in_turn)]

    batches = drawn((10, 3, 8), in_turn=False)
    assert sorted(row for batch in batches for row in batch) == [*range(21)]
    assert all(len({row >= 10 for row in batch}) == len({row >= 13 for row in batch}) == 1 for batch in batches)
    assert drawn((10, 3, 8), in_turn=False) == batches != drawn((10, 3, 8), in_turn=False, seed=1)
    turns = drawn((10, 9), in_turn=True)
    assert [min(batch) >= 10 for batch in turns] == [False, True] * 3
    assert [len(batch) for batch in turns] == [4, 4, 4, 4, 2, 1]
    assert len(drawn((10, 3, 8), in_turn=True)) == 3


@pytest.mark.parametrize("strategy", ["random", "group_by_length", "sequential", "no_duplicates"])
def test_every_order_of_rows_goes_with_several_datasets(strategy: str, tmp_path: Path) -> None:
    made = trainer(tmp_path, train_sampling_strategy=strategy)
    batches = made.get_train_dataloader()
    of_epoch = list(batches.epoch(1))
    assert len(of_epoch) == len(batches) == 5 + 3
    assert sorted(int(batch["loss_number"][0]) for batch in of_epoch) == [0] * 5 + [1] * 3
    assert [len(batch["labels"]) % (3 - int(batch["loss_number"][0])) for batch in of_epoch] == [0] * 8


def test_a_resumed_training_has_the_same_mini_batches(tmp_path: Path) -> None:
    """Stopped inside of the second epoch."""
    whole = trainer(tmp_path / "whole", max_steps=12)
    whole.train()
    trainer(tmp_path / "out", max_steps=11, save_strategy="steps", save_steps=11).train()
    resumed = trainer(tmp_path / "out", max_steps=12, save_strategy="steps", save_steps=11)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    other = trainer(tmp_path / "out", max_steps=12, multi_dataset_batch_sampler="round_robin")
    with pytest.raises(UserError, match="was written with multi_dataset_batch_sampler='proportional' and this run"):
        other.train(resume_from_checkpoint=True)


def test_a_step_of_mini_batches_with_different_losses() -> None:
    """Accumulated: one compares its rows and the other does not, in any order; each row counts as much."""
    options = EmbeddingLoss(scale=3.0), EmbeddingLoss("cosine")
    examples = [EmbeddingExamples(rows[:6], words()) for rows in DATASETS.values()]
    collators = [EmbeddingCollator(words().pad_token_id, texts) for texts in (3, 2)]
    batches = [collate(list(rows)) for collate, rows in zip(collators, examples, strict=True)]
    losses = [options[0].decided(texts=3), options[1]]
    plain = model().train()
    value = torch.stack([expected_loss(plain, *pair) for pair in zip(batches, losses, strict=True)]).mean()
    value.backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    batches = [
        {**batch, "loss_number": torch.full((len(batch["labels"]),), number)} for number, batch in enumerate(batches)
    ]
    for order in (batches, batches[::-1]):
        pipe = Pipeline(copy.deepcopy(plain), 2, 4, "1f1b", loss=EmbeddingLosses(losses))
        pipe.zero_grad()
        found = pipe.train_step(order)
        assert_same(Result(float(found), gathered_gradients(pipe)), Result(float(value.detach()), expected))
        for batch, own in zip(batches, losses, strict=True):
            alone = expected_loss(plain, batch, own).detach()
            assert pipe.eval_step(batch).loss == pytest.approx(float(alone), abs=1e-10)


def _in_processes(folder: str) -> tuple[list[float], dict[str, float]]:
    made = trainer(folder, eval_dataset=DATASETS, max_steps=4)
    made.train()
    metrics = made.evaluate()
    again = made.evaluate(DATASETS if made.world.is_main else None)
    names = [name for name in metrics if name.endswith(("loss", "accuracy"))]
    assert {name: again[name] for name in names} == {name: metrics[name] for name in names}
    return losses(made), {name: metrics[name] for name in names}


def test_stages_in_processes(tmp_path: Path) -> None:
    """The main process alone reads rows; the others know the losses."""
    first, second = run_gloo(_in_processes, 2, str(tmp_path / "two"))
    alone = _in_processes(str(tmp_path / "one"))
    assert first == second
    assert first[0] == pytest.approx(alone[0], abs=1e-9)
    assert first[1] == pytest.approx(alone[1], abs=1e-9)
    assert [*first[1]] == ["eval_triplets_loss", "eval_triplets_accuracy", "eval_scored_loss"]


def test_the_rows_say_how_many_texts_they_have(tmp_path: Path) -> None:
    """Of one dataset, and of several with one loss; an error had asked for `texts`."""
    made = trainer(tmp_path, ROWS, None)
    assert made.pipe.loss == EmbeddingLoss(texts=3)
    pairs = [{name: row[name] for name in ("anchor", "positive")} for row in ROWS]
    made = trainer(tmp_path, {"pairs": pairs, "triplets": ROWS}, None, scale=3.0)
    assert [loss.rows_per_unit for loss in made._losses] == [2, 3]
    assert all(loss.scale == 3.0 for loss in made._losses)
    made.train()
    assert made.evaluate(pairs)["eval_loss"] != made.evaluate(ROWS)["eval_loss"]
    with pytest.raises(UserError, match=r"a dataset with 4 texts needs the loss .*, and the trainer was made for"):
        made.evaluate([{**row, "another": row["anchor"]} for row in ROWS])


def test_losses_and_prompts_that_do_not_fit(tmp_path: Path) -> None:
    pairs = [{name: row[name] for name in ("anchor", "positive")} for row in ROWS]
    for train, loss, values, message in (
        (ROWS, LOSSES, {}, "a dataset has no name, and loss is a dict of triplets, scored; give a dict of datasets"),
        (
            {**DATASETS, "new": ROWS},
            LOSSES,
            {},
            "the dataset 'new' has no loss, and loss is a dict of triplets",
        ),
        (DATASETS, LOSSES, {"eval_dataset": ROWS}, "a dataset has no name, and loss is a dict of"),
        (DATASETS, LOSSES, {"eval_dataset": {"new": ROWS}}, "the dataset 'new' has no loss"),
        (DATASETS, LOSSES, {"scale": 3.0}, "scale=3.0 is an option of the loss, and loss is given"),
        (DATASETS, torch.nn.MSELoss(), {}, "loss: found a MSELoss; give an EmbeddingLoss"),
        (DATASETS, EmbeddingLoss("triplet"), {}, "the rows have 2 texts, and a row of loss_type='triplet' has 3"),
        (DATASETS, {**LOSSES, "scored": EmbeddingLoss("cosine", "cls")}, {}, "the losses have the pooling and"),
        ({"a": iter(ROWS)}, None, {}, r"train_dataset\['a'\] has no length, by which the datasets are drawn"),
        (DATASETS, LOSSES, {"prompts": {"scorde": "q "}}, "prompts has 'scorde', which no dataset and no column is"),
        (ROWS, None, {"prompts": {"scored": {"first": "q "}}}, "prompts are of datasets, such as 'scored'; give a"),
        ({"a": pairs}, None, {"prompts": {"a": {"first": "q "}}}, "has the columns anchor, positive, and prompts has"),
        (DATASETS, LOSSES, {"multi_dataset_batch_sampler": "random"}, "multi_dataset_batch_sampler: found 'random'"),
    ):
        with pytest.raises(UserError, match=message):
            trainer(tmp_path, train, loss, **values)
    with pytest.raises(UserError, match=r"the given Pipeline has the loss .*; make it with that loss, or give the"):
        PipelineEmbeddingTrainer(
            Pipeline(model(), 2, 3, loss=EmbeddingLoss()),
            PipelineEmbeddingConfig(output_dir=str(tmp_path), use_cpu=True),
            train_dataset=DATASETS,
            processing_class=words(),
            loss=LOSSES,
        )


def _with_another_loss(folder: str) -> None:
    rank = torch.distributed.get_rank()
    with pytest.raises(DisagreementError, match="loss"):
        trainer(folder, loss=LOSSES if rank else {**LOSSES, "triplets": EmbeddingLoss(scale=1.0)})


def test_processes_with_different_losses(tmp_path: Path) -> None:
    run_gloo(_with_another_loss, 2, str(tmp_path))
