"""Packed micro-batches: the loss and every gradient of the rows, without their padding."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DataCollatorWithFlattening
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_gpipe import Pipeline, PipelineTrainer
from hf_gpipe.adapters import adapter_for
from hf_gpipe.adapters.packing import as_rows, balanced, packed_parts
from hf_gpipe.data import PairCollator
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.model.clone import Batch, exact_clone, padded_batch
from hf_gpipe.model.reference import Step, plain_step
from hf_gpipe.planner.costs.tracing import StageTracer
from hf_gpipe.planner.workload import Workload
from hf_gpipe.runtime.micro_batch import MicroBatch
from scripts.families import default_config
from scripts.random_cases.in_float64 import InFloat64
from tests.gloo import run_gloo
from tests.oracle import gathered_gradients
from tests.training.toy import CausalRows, Recorder, arguments

TOLERANCE = 1e-10
ROWS = [{"input_ids": list(range(5, 5 + length))} for length in (5, 9, 1, 7, 3)]


def flattened(batch: Batch) -> dict[str, Any]:
    """A padded mini-batch as TRL's collator gives it without padding: one row, filled up to a multiple of 8."""
    rows = [
        (ids[: int(mask.sum())], labels[: int(mask.sum())])
        for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True)
    ]
    missing = -sum(len(ids) for ids, _ in rows) % 8
    fill = torch.zeros(missing, dtype=torch.long)
    positions = torch.cat([*(torch.arange(len(ids)) for ids, _ in rows), fill])
    labels = torch.cat([*(labels for _, labels in rows), fill - 100])
    starts = (positions == 0).nonzero().flatten()
    borders = torch.cat([starts, torch.tensor([len(positions)])]).to(torch.int32)
    return {
        "input_ids": torch.cat([*(ids for ids, _ in rows), fill])[None],
        "labels": labels.masked_fill(positions == 0, -100)[None],
        "position_ids": positions[None],
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": 9,
        "max_length_k": 9,
        "seq_idx": (positions == 0).cumsum(0).to(torch.int32)[None] - 1,
    }


def step(pipe: Pipeline, batch: dict[str, Any] | None) -> Step:
    pipe.zero_grad()
    return Step(float(pipe.train_step(batch)), gathered_gradients(pipe), torch.float64)


@pytest.mark.parametrize(
    ("family", "attention", "num_stages", "num_micro_batches", "options"),
    [
        ("llama", "sdpa", 2, 3, {"schedule": "1f1b"}),
        ("qwen3", "eager", 3, 2, {"recompute": "stage"}),
        ("gpt2", "sdpa", 1, 1, {"recompute": "block"}),
        ("gpt2", "eager", 2, 8, {"schedule": "gpipe_fused"}),
        ("gemma3", "sdpa", 3, 2, {"schedule": "zb_h1"}),
        ("gemma3", "eager", 2, 1, {"recompute": "stage"}),
        ("mixtral", "sdpa", 2, 2, {"schedule": "zb_h1"}),
        ("falcon", "sdpa", 2, 2, {}),
        ("marian", "sdpa", 3, 2, {"schedule": "1f1b"}),
        ("marian", "eager", 2, 3, {"recompute": "stage"}),
        ("bart", "sdpa", 4, 2, {"recompute": "block"}),
        ("m2m_100", "sdpa", 2, 1, {"schedule": "zb_h1"}),
        ("t5", "sdpa", 3, 2, {"schedule": "gpipe"}),
        ("t5", "eager", 2, 8, {"recompute": "stage"}),
        ("mbart", "sdpa", 2, 2, {}),
        ("pegasus", "eager", 2, 2, {}),
    ],
)
def test_packed_rows_have_the_loss_and_gradients_of_the_rows(
    family: str, attention: str, num_stages: int, num_micro_batches: int, options: dict[str, Any]
) -> None:
    model = exact_clone(default_config(family), torch.float64)
    batch = padded_batch(model, with_images=False)
    with InFloat64():
        expected = plain_step(model, batch)
        model.zero_grad()
        pipe = Pipeline(model, num_stages, num_micro_batches, attn_implementation=attention, packing=True, **options)
        assert step(pipe, batch).difference(expected) <= TOLERANCE
        if not model.config.is_encoder_decoder:
            assert step(pipe, flattened(batch)).difference(expected) <= TOLERANCE


def test_flash_attention_gets_the_borders_of_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels need a GPU; here a function with its arguments takes their place."""
    name, calls = "flash_attention_2", []

    def flash(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        assert attention_mask is None
        borders = options["cu_seq_lens_q"]
        assert torch.equal(borders, options["cu_seq_lens_k"])
        lengths = borders.diff().tolist()
        assert max(lengths) == options["max_length_q"] == options["max_length_k"]
        calls.append(lengths)
        parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return torch.cat([sdpa(module, *part, None, scaling=options["scaling"])[0] for part in parts], dim=1), None

    model = exact_clone(default_config("llama"), torch.float64)
    batch = padded_batch(model)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, name, flash)
    with InFloat64():
        expected = plain_step(model, batch)
        pipe = Pipeline(model, 2, 2, packing=True)
        for one in (pipe.adapter.reference, *(stage.model for stage in pipe.models.values())):
            one.config._attn_implementation = name
        model.zero_grad()
        assert step(pipe, batch).difference(expected) <= TOLERANCE
    assert sorted(lengths for lengths in calls[:: len(calls) // 2]) == [[8, 7], [9, 6]]


def test_a_row_may_be_longer_than_the_table_of_positions() -> None:
    model = exact_clone(default_config("gpt2"), torch.float32)
    ids = torch.arange(3, 63).repeat(2, 1)
    pipe = Pipeline(model, 1, 1)
    expected = float(pipe.train_step({"input_ids": ids, "labels": ids}))
    pipe.packing = True
    assert float(pipe.train_step({"input_ids": ids, "labels": ids})) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(DataError, match="a row of input_ids is 65 tokens long, and the decoder has positions for 64"):
        pipe.train_step({name: torch.ones(1, 65, dtype=torch.long) for name in ("input_ids", "labels")})


def test_an_auxiliary_loss_is_that_of_the_packed_micro_batches() -> None:
    config = default_config("mixtral")
    config.output_router_logits, config.router_aux_loss_coef = True, 0.1
    model = exact_clone(config, torch.float64)
    batch = flattened(padded_batch(model))
    with InFloat64():
        # With a cache transformers does not look for documents.
        inputs = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
        expected = model(**inputs, use_cache=False).loss.detach()
        assert abs(float(Pipeline(model, 2, 1).train_step(batch)) - float(expected)) <= 1e-6


def _in_a_process(family: str, batch: dict[str, Any] | None) -> tuple[Step, float]:
    model = exact_clone(default_config(family), torch.float64)
    pipe = Pipeline(model, 2, 3, packing=model.config.is_encoder_decoder)
    mine = batch if pipe.world.is_main else None
    with InFloat64():
        return step(pipe, mine), pipe.eval_step(mine).loss


@pytest.mark.parametrize("family", ["llama", "marian"])
def test_two_processes_take_documents(family: str) -> None:
    model = exact_clone(default_config(family), torch.float64)
    batch = padded_batch(model)
    with InFloat64():
        expected = plain_step(model, batch)
    if not model.config.is_encoder_decoder:
        batch = flattened(batch)
    for found, loss in run_gloo(_in_a_process, 2, family, batch):
        assert found.difference(expected) <= TOLERANCE
        assert abs(loss - expected.loss) <= TOLERANCE


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 12))
def test_documents_are_shared_out_by_tokens(lengths: list[int], count: int) -> None:
    parts = balanced(lengths, count)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert len(parts) == min(count, len(lengths))
    assert all(part == sorted(part) and part for part in parts)
    tokens = [sum(lengths[index] for index in part) for part in parts]
    assert tokens == sorted(tokens, reverse=True)
    # Graham's bounds: the part with the most tokens was the smallest before it got its last document.
    assert tokens[0] <= sum(lengths) / len(parts) + max(lengths) * (1 - 1 / len(parts))
    if len(parts[0]) > 1:
        assert tokens[0] - tokens[-1] <= min(lengths[index] for index in parts[0])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_planner_counts_the_memory_of_a_packed_micro_batch(attention: str) -> None:
    config = default_config("gemma3")
    adapter = adapter_for(exact_clone(config, torch.float32).config, attn_implementation=attention)
    length = 12
    document = {name: torch.arange(length) for name in ("input_ids", "labels", "position_ids")}

    def wanted(boundary: int) -> dict[str, bool]:
        return {"hidden": True}

    blocks, workload = range(1, 3), Workload.packed(3, (length, length), (length, length))
    real = StageTracer(adapter, blocks, wanted, is_real=True).trace(MicroBatch.alone(adapter.packed([document] * 3)))
    planned = StageTracer(adapter, blocks, wanted).trace(workload.micro_batch(adapter))
    # What attention gave for each document is put together in one more tensor.
    assert real.saved == pytest.approx(planned.saved, rel=0.06)


@pytest.mark.parametrize(
    "collator",
    [
        DataCollatorWithFlattening(),
        DataCollatorWithFlattening(return_position_ids=False, return_flash_attn_kwargs=True),
        DataCollatorWithFlattening(return_position_ids=False, return_seq_idx=True),
        PairCollator(0),
    ],
)
def test_documents_are_found_in_every_form(collator: Any) -> None:
    rows = ROWS if not isinstance(collator, PairCollator) else [row | {"labels": row["input_ids"]} for row in ROWS]
    batch = {name: value for name, value in collator(rows).items() if isinstance(value, torch.Tensor)}
    (documents,) = packed_parts(batch, 1)
    assert [one["input_ids"].tolist() for one in documents] == [row["input_ids"] for row in ROWS]
    assert [one["position_ids"].tolist() for one in documents] == [list(range(len(row["input_ids"]))) for row in ROWS]
    rows_again = as_rows(batch)
    assert torch.equal(rows_again["attention_mask"], PairCollator(0)(ROWS)["attention_mask"])
    assert torch.equal(rows_again["input_ids"], PairCollator(0)(ROWS)["input_ids"])


def test_collators_of_trl(tmp_path: Path) -> None:
    collators = pytest.importorskip("trl.trainer.sft_trainer")
    collator = collators.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    model = exact_clone(default_config("llama"), torch.float32)
    pipe = Pipeline(model, 2, 2)
    expected = float(pipe.train_step(DataCollatorWithFlattening()(ROWS)))
    ids = [row["input_ids"] for row in ROWS]
    whole = {"input_ids": [*chain(*ids)], "seq_lengths": list(map(len, ids))}
    for rows in (ROWS, [whole]):
        assert float(pipe.train_step(collator(rows))) == pytest.approx(expected, rel=1e-6)
    trainer = PipelineTrainer(pipe, arguments(tmp_path), collator, train_dataset=[whole])
    (batch,) = trainer.get_train_dataloader()
    assert int((batch["position_ids"] == 0).sum()) == len(ROWS), "the column of lengths is kept"


def test_a_trainer_takes_a_flattening_collator_as_it_is(tmp_path: Path) -> None:
    results = []
    for number, (collator, values) in enumerate(
        [(PairCollator(0), {}), (PairCollator(0), {"packing": True}), (DataCollatorWithFlattening(), {})]
    ):
        recorder = Recorder()
        trainer = PipelineTrainer(
            exact_clone(default_config("llama"), torch.float32),
            arguments(tmp_path / str(number), max_steps=2, **values),
            collator,
            train_dataset=CausalRows(),
            eval_dataset=CausalRows(6, seed=1),
            callbacks=[recorder],
        )
        trainer.train()
        results.append([*recorder.losses, trainer.evaluate()["eval_loss"]])
    for found in results[1:]:
        assert found == pytest.approx(results[0], rel=1e-5)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("mamba", {}, "documents in one row change each other's logits"),
        ("longt5", {}, "documents in one row change each other's logits"),
        # Its own positions do not begin at 0, as those of documents in a packed row do.
        ("roberta", {}, "documents in one row change each other's logits"),
    ],
)
def test_models_that_cannot_be_packed(family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Pipeline(exact_clone(default_config(family), torch.float32), 2, 2, packing=True, **options)


def test_sources_and_targets_that_are_flattened_are_refused() -> None:
    pipe = Pipeline(exact_clone(default_config("marian"), torch.float32), 2, 2)
    ids = torch.tensor([[5, 6, 7, 8]])
    with pytest.raises(DataError, match="cannot tell its sources and targets apart"):
        pipe.train_step({"input_ids": ids, "labels": ids, "position_ids": torch.tensor([[0, 1, 0, 1]])})


def test_a_row_of_sources_may_be_longer_than_the_table_of_positions() -> None:
    model = exact_clone(default_config("bart"), torch.float32)
    most = model.config.max_position_embeddings
    ids = torch.randint(3, 60, (3, most))
    pipe = Pipeline(model, 2, 1)
    expected = float(pipe.train_step({"input_ids": ids, "labels": ids}))
    pipe.packing = True
    assert float(pipe.train_step({"input_ids": ids, "labels": ids})) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(DataError, match=f"a row of decoder_input_ids is {most + 1} tokens long, and the decoder"):
        pipe.train_step({"input_ids": ids, "labels": torch.ones(3, most + 1, dtype=torch.long)})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_planner_counts_the_memory_of_packed_pairs(attention: str) -> None:
    adapter = adapter_for(exact_clone(default_config("marian"), torch.float32).config, attn_implementation=attention)
    document = {name: torch.arange(length) + 3 for name, length in (("input_ids", 12), ("labels", 9))}
    end = len(adapter.layers) - 1
    block = range(end - 1, end)

    def wanted(boundary: int) -> dict[str, bool]:
        return dict.fromkeys(adapter.sources(boundary), True)

    real = StageTracer(adapter, block, wanted, is_real=True).trace(MicroBatch.alone(adapter.packed([document] * 3)))
    planned = StageTracer(adapter, block, wanted).trace(Workload.packed(3, (12, 12), (9, 9)).micro_batch(adapter))
    assert real.saved == pytest.approx(planned.saved, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]])}, "row 1 of attention_mask has a 0 between"),
        ({"attention_mask": torch.ones(2, 1, 4, 4)}, r"attention_mask has the shape \(2, 1, 4, 4\)"),
        ({"weights": torch.ones(2)}, r"weights has the shape \(2,\)"),
    ],
)
def test_mini_batches_that_cannot_be_packed(changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(DataError, match=message):
        packed_parts({"input_ids": torch.ones(2, 4, dtype=torch.long), **changes}, 2)


def test_a_target_that_is_masked_is_refused() -> None:
    ids = torch.ones(2, 4, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "decoder_attention_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]])}
    with pytest.raises(DataError, match="row 1 of decoder_attention_mask has a 0 before the target's last token"):
        packed_parts(batch, 2, ("labels", "decoder_attention_mask"))
    batch["labels"] = ids.masked_fill(torch.tensor([[0, 0, 0, 0], [0, 1, 1, 1]]).bool(), -100)
    assert [len(one["labels"]) for one in packed_parts(batch, 1, ("labels", "decoder_attention_mask"))[0]] == [4, 1]


def test_an_entry_that_is_no_tensor_is_named_in_one_process_too() -> None:
    pipe = Pipeline(exact_clone(default_config("llama"), torch.float32), 1, 1)
    with pytest.raises(DataError, match="'row' is a int"):
        pipe.train_step({"input_ids": torch.ones(1, 4, dtype=torch.long), "row": 3})  # type: ignore[dict-item]
