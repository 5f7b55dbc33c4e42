"""Rows cut into chunks of tokens: the loss and every gradient of whole rows."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from transformers import MistralConfig, PreTrainedModel

from hf_gpipe import Pipeline, RowLoss
from hf_gpipe.adapters.attention import lower_right
from hf_gpipe.adapters.attention.lower_right import LowerRightMask
from hf_gpipe.adapters.packing import packed_parts
from hf_gpipe.errors import DataError, ScheduleError, UnsupportedModelError, UserError
from hf_gpipe.model.clone import Batch, exact_clone
from hf_gpipe.model.reference import Step, plain_step
from hf_gpipe.modes.chunks.cutting import borders_of
from hf_gpipe.schedule import (
    IN_TURN,
    SCHEDULES,
    V_SHAPED,
    Schedule,
    build,
    check_table,
    placement_for,
    simulate,
    training_schedules,
)
from hf_gpipe.schedule.kinds import Held
from hf_gpipe.schedule.simulate import Costs
from scripts.families import default_config
from scripts.random_cases.in_float64 import InFloat64, in_float64
from tests.gloo import run_gloo
from tests.oracle import gathered_gradients, padded_batch, plain_model, run_plain, tiny_config
from tests.schedule.cases import peak

TOLERANCE = 1e-10
#: Schedules that say where the stages are.
PLACED = (*IN_TURN, *V_SHAPED)


def clone(family: str, attention: str = "sdpa", coefficient: float = 0.0) -> PreTrainedModel:
    """A tiny clone of a family in float64, whose experts' auxiliary loss has a coefficient."""
    model = exact_clone(default_config(family), torch.float64)
    model.set_attn_implementation(attention)
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = bool(coefficient)
        model.config.router_aux_loss_coef = model.router_aux_loss_coef = coefficient
    return model


def rows(num_rows: int, length: int, padding: str = "right") -> Batch:
    """Rows of different lengths; those on the left or on the right are padded."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, 20, (num_rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, num_rows):
        if padding == "right":
            mask[row, length - row % length :] = 0
        elif padding == "left":
            mask[row, : row % length] = 0
    return {
        "input_ids": ids.masked_fill(mask == 0, 0),
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def unverified() -> Any:
    """Context manager that spares a model the comparison of its clone, which takes longer than the test's own."""
    return patch("hf_gpipe.modes.chunks.check.verify")


def step(pipe: Pipeline, batch: Any) -> Step:
    pipe.zero_grad()
    return Step(float(pipe.train_step(batch)), gathered_gradients(pipe), torch.float64)


@pytest.mark.parametrize(
    ("family", "attention", "num_stages", "chunks", "options"),
    [
        ("llama", "eager", 3, 5, {"schedule": "1f1b"}),
        ("llama", "sdpa", 2, 3, {"schedule": "zb_h1", "recompute": "none"}),
        ("qwen3", "sdpa", 3, 2, {"schedule": "gpipe", "recompute": "block"}),
        ("gemma3_text", "sdpa", 2, 4, {"schedule": "1f1b", "recompute": [1, 2]}),
        ("mistral", "sdpa", 3, 3, {"schedule": "gpipe_fused"}),
        ("gpt2", "sdpa", 2, 3, {"schedule": "zb_h2"}),
        ("gpt2", "sdpa", 2, 3, {"schedule": "gpipe", "recompute": "block"}),
        ("opt", "sdpa", 3, 3, {"schedule": "1f1b"}),
        ("gpt_neox", "sdpa", 2, 7, {"schedule": "naive"}),
        ("falcon", "sdpa", 1, 3, {"schedule": "1f1b"}),
        ("bloom", "eager", 2, 3, {"schedule": "1f1b"}),
        ("mixtral", "sdpa", 2, 3, {"schedule": "gpipe"}),
        ("cohere2", "sdpa", 2, 3, {"schedule": "1f1b"}),
    ],
)
def test_exact(family: str, attention: str, num_stages: int, chunks: int, options: dict[str, Any]) -> None:
    # What blocks run again in backward is outside of the mode. This clone is compared here, so none of it has to be;
    # that the comparison of a clone lets families pass is seen with llama, and in the next test.
    with (
        nullcontext() if options.get("recompute") == "block" else InFloat64(),
        nullcontext() if family == "llama" else unverified(),
    ):
        model, batch = clone(family, attention), rows(4, 23)
        expected = plain_step(model, batch)
        pipe = Pipeline(model, num_stages, 2, sequence_chunks=chunks, **options)
        assert step(pipe, batch).difference(expected) <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "recompute"),
    [("qwen3", "stage"), ("qwen3", "block"), ("gpt2", "none"), ("gemma3_text", "none")],
)
def test_rows_without_padding(family: str, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody writes out a mask of tokens by tokens, and the gradients are the same; qwen3 has groups of heads."""
    made = set()
    of = LowerRightMask.of
    monkeypatch.setattr(LowerRightMask, "of", lambda *sizes: made.add(sizes[:2]) or of(*sizes))
    with nullcontext() if recompute == "block" else InFloat64():
        model, batch = clone(family), rows(2, 23, "none")
        expected = plain_step(model, batch)
        pipe = Pipeline(model, 3, 2, recompute=recompute, sequence_chunks=3)
        made.clear()
        assert step(pipe, batch).difference(expected) <= TOLERANCE
    assert made == {(7, 15), (8, 23)}


@pytest.mark.parametrize(("packing", "sizes"), [(False, {(2, 4), (2, 6)}), (True, {(2, 6), (4, 6)})])
def test_chunks_attend_by_the_function_that_needs_no_mask(
    packing: bool, sizes: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is installed beneath the function that runs attention document by document."""
    found = set()
    attend = lower_right.lower_right_attention

    def noting(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> torch.Tensor:
        found.add((query.shape[2], key.shape[2]))
        return attend(query, key, *rest)

    monkeypatch.setattr(lower_right, "lower_right_attention", noting)
    pipe = Pipeline(clone("llama"), 2, 1, recompute="none", sequence_chunks=3, packing=packing)
    found.clear()
    pipe.train_step(rows(2, 6, "none"))
    assert found == sizes


@pytest.mark.parametrize(("packing", "recompute"), [(False, "none"), (True, "stage")])
def test_compiled_blocks(packing: bool, recompute: str) -> None:
    config, batch = tiny_config("llama"), rows(2, 8, "none")
    config.num_hidden_layers = 1
    model = plain_model(config)
    model.set_attn_implementation("sdpa")
    expected = plain_step(model, batch)
    with unverified():
        options = {"recompute": recompute, "torch_compile": "aot_eager", "sequence_chunks": 2, "packing": packing}
        pipe = Pipeline(model, 2, 2, "gpipe", **options)
    assert step(pipe, batch).difference(expected) <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "num_stages", "chunks", "options", "padding"),
    [
        ("mixtral", 1, 2, {"schedule": "1f1b"}, "right"),
        ("mixtral", 2, 3, {"schedule": "zb_h1", "recompute": "none"}, "left"),
        ("mixtral", 3, 5, {"schedule": "gpipe", "recompute": "block"}, "right"),
        ("mixtral", 2, 1, {"schedule": "1f1b"}, "right"),
        ("qwen2_moe", 3, 3, {"schedule": "gpipe_fused"}, "none"),
        ("olmoe", 2, 3, {"schedule": "1f1b"}, "left"),
    ],
)
def test_the_auxiliary_loss_of_experts_is_that_of_whole_rows(
    family: str, num_stages: int, chunks: int, options: dict[str, Any], padding: str
) -> None:
    """A mean over the chunks, or gradients of the last chunk's logits alone, would be off by 5e-3 and more."""
    # The comparison says whether padding on the left is allowed.
    with in_float64(), nullcontext() if padding == "left" else unverified():
        model, batch = clone(family, coefficient=0.5), rows(4, 11, padding)
        expected = plain_step(model, batch)
        pipe = Pipeline(model, num_stages, 2, sequence_chunks=chunks, **options)
        assert step(pipe, batch).difference(expected) <= TOLERANCE


@settings(max_examples=14, deadline=None)
@given(
    num_stages=st.integers(1, 4),
    num_micro_batches=st.integers(1, 3),
    chunks=st.integers(2, 6),
    length=st.integers(1, 13),
    taper=st.sampled_from([0.0, 0.0, 0.7, 3.0, 50.0]),
    padding=st.sampled_from(["right", "left", "none"]),
    schedule=st.sampled_from([name for name in training_schedules() if SCHEDULES[name].takes_groups]),
    recompute=st.sampled_from(["none", "stage", "block"]),
    tied=st.booleans(),
)
def test_any_step_is_exact(
    num_stages: int,
    num_micro_batches: int,
    chunks: int,
    length: int,
    taper: float,
    padding: str,
    schedule: str,
    recompute: str,
    tied: bool,
) -> None:
    if schedule in V_SHAPED:
        num_stages = 2
    model, batch = plain_model(tiny_config("llama", tied=tied)), rows(3, length + 1, padding)
    model.set_attn_implementation("sdpa")
    expected = plain_step(model, batch)
    options = {"schedule": schedule, "recompute": recompute, "sequence_chunks": chunks, "chunk_taper": taper}
    pipe = Pipeline(model, num_stages, num_micro_batches, **options)
    assert step(pipe, batch).difference(expected) <= TOLERANCE
    assert not any(stage.shared for stage in pipe.stages.values())


@pytest.mark.parametrize(
    ("family", "attention", "num_stages", "chunks", "options"),
    [
        ("llama", "sdpa", 3, 5, {"schedule": "1f1b"}),
        ("gemma3_text", "sdpa", 2, 4, {"schedule": "zb_h1", "recompute": "none"}),
        ("mistral", "sdpa", 3, 2, {"schedule": "gpipe", "recompute": "block"}),
        ("gpt2", "sdpa", 2, 3, {"schedule": "zb_v"}),
        ("opt", "eager", 3, 3, {"schedule": "1f1b"}),
        ("bloom", "eager", 1, 3, {"schedule": "1f1b"}),
        ("mixtral", "sdpa", 2, 7, {"schedule": "gpipe_fused"}),
    ],
)
def test_packed_rows(family: str, attention: str, num_stages: int, chunks: int, options: dict[str, Any]) -> None:
    """Two documents of 22 and 21 tokens a row, of which the plain model sees each alone."""
    with in_float64(), unverified():
        model, batch = clone(family, attention), rows(4, 23)
        expected = plain_step(model, batch)
        pipe = Pipeline(model, num_stages, 2, packing=True, sequence_chunks=chunks, **options)
        assert step(pipe, batch).difference(expected) <= TOLERANCE


@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5).filter(lambda lengths: max(lengths) > 1),
    window=st.sampled_from([None, 1, 2, 3, 5]),
    attention=st.sampled_from(["sdpa", "eager"]),
    num_stages=st.integers(1, 3),
    num_micro_batches=st.integers(1, 2),
    chunks=st.integers(2, 7),
    recompute=st.sampled_from(["none", "stage"]),
)
def test_a_document_is_never_attended_across(
    lengths: list[int],
    window: int | None,
    attention: str,
    num_stages: int,
    num_micro_batches: int,
    chunks: int,
    recompute: str,
) -> None:
    """Wherever the borders of chunks, documents and windows are."""
    config = MistralConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=window, pad_token_id=0,
    )  # fmt: skip
    model = plain_model(config)
    model.set_attn_implementation(attention)
    ids = torch.randint(3, 20, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(sum(lengths)))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    with InFloat64(), unverified():
        expected = plain_step(model, batch)
        options = {"recompute": recompute, "packing": True, "sequence_chunks": chunks}
        pipe = Pipeline(model, num_stages, num_micro_batches, "1f1b", **options)
        assert step(pipe, batch).difference(expected) <= TOLERANCE


def test_a_flattened_mini_batch() -> None:
    """Its documents are found without `packing`."""
    with InFloat64():
        model, batch = clone("llama"), rows(3, 9)
        expected = plain_step(model, batch)
        (row,) = packed_parts(batch, 1)
        flattened = {name: torch.cat([one[name] for one in row])[None] for name in row[0]}
        assert step(Pipeline(model, 2, 2, sequence_chunks=4), flattened).difference(expected) <= TOLERANCE


def test_the_auxiliary_loss_of_packed_rows() -> None:
    with in_float64(), unverified():
        model, batch = clone("mixtral", coefficient=0.5), rows(4, 11)
        whole, cut = (
            step(Pipeline(model, 2, 2, "1f1b", packing=True, sequence_chunks=chunks), batch) for chunks in (1, 4)
        )
        assert cut.difference(whole) <= TOLERANCE


def test_the_reference_of_the_oracle_is_the_plain_loop() -> None:
    """The comparison above and the oracle of the other tests agree on one case."""
    config = tiny_config("llama")
    with InFloat64():
        model, batch = plain_model(config), padded_batch(config)
        expected = run_plain(model, batch, 2)
        found = step(Pipeline(model, 2, 2, "1f1b", sequence_chunks=3), batch)
        assert abs(found.loss - expected.loss) <= TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        {"peft_config": LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)},
        {"length_bucketing": True},
        {"boundary_dtype": "float32"},
    ],
)
def test_beside_other_options(options: dict[str, Any]) -> None:
    """Whole rows and rows in chunks give the same step."""
    batch = rows(4, 11)
    steps = []
    for chunks in (1, 3):
        model = plain_model(tiny_config("llama"))
        model.set_attn_implementation("sdpa")
        steps.append(step(Pipeline(model, 2, 2, "1f1b", sequence_chunks=chunks, seed=1, **options), batch))
    assert steps[1].difference(steps[0]) <= TOLERANCE


def test_gradients_are_accumulated_over_mini_batches() -> None:
    model, batches = plain_model(tiny_config("llama")), [rows(2, 9), rows(2, 7)]
    model.set_attn_implementation("sdpa")
    steps = [step(Pipeline(model, 2, 2, "zb_h1", sequence_chunks=k, accumulation=2), batches) for k in (1, 3)]
    assert steps[1].difference(steps[0]) <= TOLERANCE


def in_processes(cases: list[tuple[str, int, int]], replicas: int, zero: int) -> list[float]:
    """The differences of one step of each case: a schedule, its stages and the number of rows; 1f1b packs rows too."""
    differences = []
    with InFloat64(), unverified():
        for schedule, num_stages, num_rows in cases:
            config, batch = tiny_config("llama"), rows(num_rows, 11)
            expected = plain_step(plain_model(config), batch)
            for packing in (False, True) if schedule == "1f1b" else (False,):
                options = {"replicas": replicas, "zero": zero, "sequence_chunks": 3, "packing": packing}
                found = step(Pipeline(plain_model(config), num_stages, 4, schedule, **options), batch)
                differences.append(found.difference(expected))
    return differences


@pytest.mark.parametrize(
    ("num_processes", "replicas", "zero", "cases"),
    [
        (2, 1, 0, [("1f1b", 2, 4), ("interleaved_1f1b", 4, 1), ("breadth_first", 4, 3), ("zb_v", 4, 3)]),
        (4, 2, 1, [("1f1b", 2, 4), ("interleaved_1f1b", 4, 3), ("zb_v", 4, 1), ("v_half", 4, 3)]),
    ],
)
def test_in_several_processes(num_processes: int, replicas: int, zero: int, cases: list[tuple[str, int, int]]) -> None:
    """All chunks of a row are on one replica, which has its keys and values."""
    for differences in run_gloo(in_processes, num_processes, cases, replicas, zero):
        assert max(differences) <= TOLERANCE


def test_dropout_does_not_depend_on_the_stages() -> None:
    config = tiny_config("llama", dropout=0.3)
    batch = rows(2, 12)
    losses = []
    for num_stages, schedule, recompute in ((1, "gpipe", "none"), (3, "1f1b", "stage"), (2, "zb_h1", "none")):
        pipe = Pipeline(config, num_stages, 2, schedule, recompute, sequence_chunks=3, seed=5, dtype="float64")
        losses.append(step(pipe, batch).loss)
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-12)


def test_evaluation_and_generation_take_whole_rows() -> None:
    config, batch = tiny_config("llama"), rows(4, 11)
    whole, cut = (Pipeline(config, 2, 2, sequence_chunks=chunks, dtype="float64") for chunks in (1, 3))
    assert torch.equal(whole.eval_step(batch).row_nll, cut.eval_step(batch).row_nll)
    prompt = {"input_ids": batch["input_ids"][:1]}
    options = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(whole.generate(**prompt, **options), cut.generate(**prompt, **options))


# ---------------------------------------------------------------------- tables


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted({name for name in SCHEDULES if SCHEDULES[name].takes_groups} - {*PLACED})),
    num_stages=st.integers(1, 4),
    num_rows=st.integers(1, 4),
    chunks=st.integers(1, 5),
    replicas=st.sampled_from([1, 2, (1, 2), (3, 1, 2)]),
    recompute=st.sampled_from(["none", "stage"]),
)
def test_every_table_of_chunks_can_be_run(
    name: str, num_stages: int, num_rows: int, chunks: int, replicas: int | tuple[int, ...], recompute: str
) -> None:
    if isinstance(replicas, tuple):
        num_stages = len(replicas)
    table = build(name, num_stages, num_rows * chunks, recompute=recompute, replicas=replicas, group_size=chunks)
    check_table(table)
    assert Schedule.from_text(table.text()) == table
    if chunks == 1:
        assert table == build(name, num_stages, num_rows, recompute=recompute, replicas=replicas)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(PLACED),
    num_processes=st.integers(1, 4),
    num_rows=st.integers(1, 5),
    chunks=st.integers(1, 9),
    replicas=st.integers(1, 2),
    recompute=st.sampled_from(["none", "stage"]),
)
def test_so_can_those_of_stages_in_turn_and_in_a_v(
    name: str, num_processes: int, num_rows: int, chunks: int, replicas: int, recompute: str
) -> None:
    num_stages = 2 * num_processes
    placement = placement_for(name, num_stages, num_processes * replicas, replicas)
    table = build(name, num_stages, num_rows * chunks, placement, recompute, group_size=chunks)
    check_table(table)
    assert Schedule.from_text(table.text()) == table
    if chunks == 1:
        assert table == build(name, num_stages, num_rows, placement, recompute)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 8))
def test_1f1b_holds_k_minus_1_chunks_more_than_those_of_a_row(num_stages: int, num_rows: int, chunks: int) -> None:
    """(K-1+k)/k rows on the first stage, however many there are; and the bubble is that of micro-batches."""
    table = build("1f1b", num_stages, num_rows * chunks, recompute="none", group_size=chunks)
    for stage in range(num_stages):
        assert peak(table, stage, Held.GRAPH) == min(num_stages - stage - 1 + chunks, num_rows * chunks)


@pytest.mark.parametrize(("num_rows", "chunks"), [(1, 8), (2, 4), (4, 8), (6, 2)])
@pytest.mark.parametrize("num_processes", [2, 4])
def test_the_bubbles_of_chunks_are_those_of_micro_batches(num_processes: int, num_rows: int, chunks: int) -> None:
    """Of two stages a process, and chunks of k seconds in all. V-shaped tables of one row wait up to P-1 ticks more."""

    def seconds(name: str, of: int) -> float:
        placement = placement_for(name, 2 * num_processes, num_processes)
        table = build(name, 2 * num_processes, num_rows * chunks, placement, "none", group_size=of)
        return float(simulate(table, Costs(forward_seconds=1, backward_seconds=2)).total_seconds)

    for name in IN_TURN:
        assert seconds(name, chunks) == seconds(name, 1)
    for name in V_SHAPED:
        more = 2 * (num_processes - 1) if num_rows == 1 or name == "v_half" else 0
        assert seconds(name, chunks) <= seconds(name, 1) + more


@pytest.mark.parametrize("chunks", [1, 2, 8, 16])
def test_one_row_fills_the_pipeline_as_micro_batches_would(chunks: int) -> None:
    table = build("1f1b", 4, chunks, recompute="none", group_size=chunks)
    assert simulate(table, Costs(forward_seconds=1, backward_seconds=2)).total_seconds == 3 * (chunks + 3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0F1 0F0 0B1 0B0 0U", "0F1 comes before 0F0"),
        ("0F0 0F1 0B0 0B1 0U", "0B0 comes before 0B1"),
        ("0F0 0F1 0I0 0I1 0W0 0W1 0U", "0I0 comes before 0I1"),
    ],
)
def test_a_table_in_another_order_is_an_error(row: str, message: str) -> None:
    text = (
        f"table: 10\nschedule: mine\nnum_stages: 1\nnum_micro_batches: 2\nplacement: 0\nchunks: 2\nprocess 0: {row}\n"
    )
    with pytest.raises(ScheduleError, match=message):
        check_table(Schedule.from_text(text))


def test_a_table_has_all_chunks_of_a_row() -> None:
    with pytest.raises(ScheduleError, match="each row has all its chunks"):
        build("1f1b", 2, 5, group_size=2)
    text = build("1f1b", 1, 4, group_size=2).text().replace("chunks: 2", "chunks: 3")
    with pytest.raises(ScheduleError, match="chunks is 3 and num_micro_batches 4"):
        check_table(Schedule.from_text(text))


def test_a_table_from_a_file_says_the_chunks(tmp_path: Any) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(build("1f1b", 2, 6, build("1f1b", 2, 6).placement.spread(2, 1), group_size=3).text())
    with pytest.raises(ScheduleError, match="cuts rows into 3 chunks, and sequence_chunks is 1"):
        Pipeline(tiny_config("llama"), 2, 2, str(path))
    with InFloat64():
        model, batch = plain_model(tiny_config("llama")), rows(2, 9)
        expected = plain_step(model, batch)
        pipe = Pipeline(model, 2, 2, str(path), sequence_chunks=3)
        assert step(pipe, batch).difference(expected) <= TOLERANCE
        with pytest.raises(ScheduleError, match="give rows of at least 3 tokens"):
            pipe.train_step(rows(2, 2))


# ---------------------------------------------------------------------- what cannot be cut


def test_a_schedule_without_an_order_is_an_error() -> None:
    with pytest.raises(UserError, match="schedule is pipedream and sequence_chunks is 2"):
        Pipeline(tiny_config("llama"), 2, 2, "pipedream", sequence_chunks=2)
    with pytest.raises(ScheduleError, match="schedule 'pipedream' has no order for rows that are cut into chunks"):
        build("pipedream", 2, 4, group_size=2)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("marian", {}, "has an encoder"),
        ("llama", {"loss": RowLoss(lambda log_probs: -log_probs)}, "the loss needs whole rows"),
    ],
)
def test_what_needs_whole_rows_is_an_error(family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"sequence_chunks cannot be more than 1: .*{message}"):
        Pipeline(tiny_config(family), 2, 2, sequence_chunks=2, **options)


def test_flash_attention_of_packed_rows_is_an_error() -> None:
    """Its kernels take one set of borders for the queries and keys of all layers, which are those of whole rows."""
    batch = rows(2, 6, "none")
    flattened = {"input_ids": batch["input_ids"].view(1, -1), "labels": batch["labels"].view(1, -1)}
    pipe = Pipeline(tiny_config("llama"), 2, 1, sequence_chunks=3)
    pipe.adapter.reference.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="'flash_attention_2' needs the documents of whole rows"):
        pipe.train_step({**flattened, "position_ids": torch.arange(6).repeat(2)[None]})


@pytest.mark.parametrize("family", ["bert-generation", "mamba", "bert"])
def test_a_family_whose_rows_cannot_be_cut_is_an_error(family: str) -> None:
    """Of some the clone fails, and others would silently give other gradients."""
    with pytest.raises(UnsupportedModelError, match=r"sequence_chunks .*a tiny clone|cannot be cut"):
        Pipeline(exact_clone(default_config(family), torch.float64), 2, 2, sequence_chunks=2)


@pytest.mark.parametrize("chunks", [2, "auto", "3 tokens"])
def test_what_is_not_given_is_planned(chunks: int | str) -> None:
    """And the number of chunks too, where it is open; the step is that of whole rows."""
    model, batch = plain_model(tiny_config("llama")), rows(2, 6)
    pipe = Pipeline(model, 2, sequence_chunks=chunks, example=batch)
    # A chunk has at least 256 tokens where the planner chooses.
    assert pipe.config.sequence_chunks == (1 if chunks == "auto" else 2)
    plan = pipe.plan()
    assert plan.timeline.schedule.group_size == pipe.config.sequence_chunks
    assert plan.step_seconds > 0
    assert step(pipe, batch).difference(plain_step(model, batch)) <= TOLERANCE


@given(length=st.integers(1, 300), count=st.integers(1, 20), taper=st.floats(0, 1e6))
def test_every_chunk_has_a_token(length: int, count: int, taper: float) -> None:
    borders = borders_of(length, min(count, length), taper)
    assert (borders[0], borders[-1], len(borders)) == (0, length, min(count, length) + 1)
    assert all(stop > start for start, stop in pairwise(borders))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_chunks": "5 rows"}, "found '5 rows'"),
        ({"sequence_chunks": "x tokens"}, "write a number of chunks, auto, or"),
        ({"sequence_chunks": "0 tokens"}, "or the most"),
        ({"chunk_taper": 1.0}, "sequence_chunks is 1, so rows are whole"),
        ({"sequence_chunks": 2, "chunk_taper": -1.0}, "chunk_taper"),
        ({"sequence_chunks": 2, "chunk_taper": "auto", "partition": "profile"}, "measures chunks of one length"),
    ],
)
def test_a_wrong_cut_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Pipeline(tiny_config("llama"), 2, 2, **options)


def test_an_entry_without_a_value_for_each_token_is_an_error() -> None:
    pipe = Pipeline(tiny_config("llama"), 2, 2, sequence_chunks=2)
    batch = rows(2, 6)
    batch["attention_mask"] = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    with pytest.raises(DataError, match="to cut rows into chunks"):
        pipe.train_step(batch)
