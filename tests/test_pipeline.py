"""Exactness: loss, every gradient and the global norm are the plain model's, however it is split and scheduled."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import Gemma3Config, GPT2Config, LlamaForQuestionAnswering, PreTrainedModel

from hf_gpipe import Pipeline
from hf_gpipe.errors import (
    DataError,
    HfGpipeError,
    PartitionError,
    StageError,
    UnsupportedModelError,
    UserError,
)
from hf_gpipe.settings.pipeline import PipelineConfig
from tests.gloo import run_gloo
from tests.oracle import VOCABULARY, assert_same, padded_batch, plain_model, run_pipeline, run_plain, tiny_config

FAMILIES = ("llama", "marian", "m2m_100", "bart")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_the_plain_model(family: str, tied: bool) -> None:
    config = tiny_config(family, tied=tied)
    batch, plain = padded_batch(config), plain_model(config)
    for number, num_micro_batches in enumerate((1, 2, 4, 7)):
        expected = run_plain(plain, batch, num_micro_batches)
        plain.zero_grad()
        for num_stages in (1, 2, 3, 4):
            # Every pair of values comes; all together take longer, and catch no more.
            if (number + num_stages + tied + FAMILIES.index(family)) % 4:
                continue
            recompute = ("none", "stage")[(number // 2 + num_stages // 2 + tied) % 2]
            pipe = Pipeline(plain, num_stages, num_micro_batches, recompute=recompute)
            assert_same(run_pipeline(pipe, batch), expected)
            assert float(pipe.grad_norm()) == pytest.approx(expected.norm, rel=1e-10)


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "gpipe_fused", "1f1b"])
@pytest.mark.parametrize("recompute", ["none", "block", "stage"])
def test_schedules_and_recomputation_change_nothing(recompute: str, schedule: str) -> None:
    # tests/test_execution.py has more schedules with both families.
    config = tiny_config("llama" if (recompute == "block") == (schedule in ("naive", "1f1b")) else "marian")
    batch, plain = padded_batch(config), plain_model(config)
    expected = run_plain(plain, batch, 3)
    pipe = Pipeline(plain, 3, 3, schedule=schedule, recompute=recompute)
    assert_same(run_pipeline(pipe, batch), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_may_hold_any_layer_alone(family: str) -> None:
    config = tiny_config(family)
    batch, plain = padded_batch(config), plain_model(config)
    expected = run_plain(plain, batch, 2)
    num_layers = len(Pipeline(plain, 1).adapter.layers)
    assert_same(run_pipeline(Pipeline(plain, num_layers, 2), batch), expected)
    for position in range(1, num_layers):
        pipe = Pipeline(plain, 2, 2, partition=[position, num_layers - position])
        assert_same(run_pipeline(pipe, batch), expected)


@pytest.mark.parametrize("family", ["llama", "marian"])
def test_float32_stays_close(family: str) -> None:
    config = tiny_config(family)
    batch, plain = padded_batch(config), plain_model(config, dtype=torch.float32)
    expected = run_plain(plain, batch, 4)
    assert_same(run_pipeline(Pipeline(plain, 3, 4), batch), expected, tolerance=1e-5)


def test_left_padding_is_kept() -> None:
    """Columns of padding are cut at the end only. With eager attention the plain model's own rows become nan."""
    config = tiny_config("llama")
    batch = {name: tensor.flip(1) for name, tensor in padded_batch(config).items()}
    plain = plain_model(config)
    plain.set_attn_implementation("sdpa")
    assert_same(run_pipeline(Pipeline(plain, 2, 3), batch), run_plain(plain, batch, 3))


def test_it_shows_its_stages_and_its_plan_in_a_few_words() -> None:
    config = tiny_config("llama")
    pipe = Pipeline(plain_model(config), 2, 3, "1f1b")
    first, *stages = repr(pipe).splitlines()
    assert first == "Pipeline(LlamaForCausalLM, num_stages=2, num_micro_batches=3, schedule='1f1b', recompute='stage')"
    assert len(stages) == 2
    assert stages[0].startswith("  stage 0; process 0; 3 layers, model.embed_tokens to model.layers.1; ")
    held = sum(parameter.numel() for parameter in pipe.models[1].parameters.values())
    assert f"model.norm to lm_head; {held:,} parameters, " in stages[1].replace("model.layers.2 to", "model.norm to")
    assert pipe._repr_html_().count("<svg") == 1
    planned = repr(pipe.plan(padded_batch(config)))
    assert planned.startswith("Plan(2 stages, 3 micro-batches, 1f1b: ")
    assert len(planned) < 150


def test_accumulated_mini_batches_run_as_one_table() -> None:
    config = tiny_config("marian")
    plain = plain_model(config)
    whole = padded_batch(config, rows=8)
    expected = run_plain(plain, whole, 4)
    plain.zero_grad()
    pipe = Pipeline(plain, 2, 2)
    halves = [{name: tensor[rows] for name, tensor in whole.items()} for rows in (slice(0, 4), slice(4, 8))]
    loss = float(pipe.train_step(halves))
    assert loss == pytest.approx(expected.loss, rel=1e-12)
    assert float(pipe.grad_norm()) == pytest.approx(expected.norm, rel=1e-12)


def test_clipping_uses_one_global_norm() -> None:
    config = tiny_config("marian")
    batch, plain = padded_batch(config), plain_model(config)
    expected = run_plain(plain, batch, 2)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    clipped = {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}
    plain.zero_grad()
    pipe = Pipeline(plain, 3, 2)
    pipe.train_step(batch)
    assert float(pipe.clip_grad_norm_(0.1)) == pytest.approx(expected.norm, rel=1e-12)
    found = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    assert found.keys() == clipped.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, clipped[name])


def test_frozen_layers_get_no_gradient() -> None:
    config = tiny_config("marian", tied=False)
    batch, plain = padded_batch(config), plain_model(config)
    for name, parameter in plain.named_parameters():
        if ".encoder." in name or "shared" in name:
            parameter.requires_grad_(False)
    expected = run_plain(plain, batch, 2)
    plain.zero_grad()
    pipe = Pipeline(plain, 4, 2)
    assert_same(run_pipeline(pipe, batch), expected)
    assert not any(pipe.stages[1].trainable_inputs.values()), "a gradient is sent to a stage that needs none"


def test_evaluation_gives_the_loss_of_each_row() -> None:
    config = tiny_config("m2m_100", dropout=0.3)
    batch, plain = padded_batch(config), plain_model(config).eval()
    evaluation = Pipeline(plain, 3, 4).eval_step(batch)
    with torch.no_grad():
        logits = plain(**batch).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    torch.testing.assert_close(evaluation.row_nll, losses.view(batch["labels"].shape).sum(1))
    assert evaluation.row_tokens.tolist() == (batch["labels"] != -100).sum(1).tolist()


@pytest.mark.parametrize("family", ["llama", "marian"])
def test_dropout_and_initial_weights_do_not_depend_on_the_split(family: str) -> None:
    config = tiny_config(family, dropout=0.2)
    batch = padded_batch(config)
    results = [
        run_pipeline(Pipeline(config, k, 3, schedule=schedule, recompute=recompute, dtype=torch.float64), batch)
        for k, schedule, recompute in [
            (1, "gpipe", "none"),
            (2, "gpipe", "stage"),
            (3, "gpipe_fused", "stage"),
            (4, "naive", "block"),
        ]
    ]
    without = run_pipeline(Pipeline(tiny_config(family), 1, 3, dtype=torch.float64), batch)
    assert abs(results[0].loss - without.loss) > 1e-4, "dropout was not active"
    for result in results[1:]:
        assert_same(result, results[0])


def test_dropout_differs_between_steps_and_leaves_the_generator_alone() -> None:
    config = tiny_config("marian", dropout=0.2)
    batch, pipe = padded_batch(config), Pipeline(config, 2, 2)
    before = torch.get_rng_state()
    losses = [float(pipe.train_step(batch)) for _ in range(2)]
    assert torch.equal(before, torch.get_rng_state())
    assert losses[0] != losses[1]


def test_a_failure_names_the_place_and_leaves_the_pipeline_usable() -> None:
    config = tiny_config("llama")
    batch, pipe = padded_batch(config), Pipeline(config, 2, 2)

    def fail(*_: object) -> None:
        raise IndexError("no")

    failing = pipe.models[0].model.register_forward_pre_hook(fail)
    with pytest.raises(
        StageError, match=r"process 0, stage 0, action 0F0: IndexError.* \(action 1 of \d+ of this process: >0F0< \S+"
    ):
        pipe.train_step(batch)
    failing.remove()
    pipe.zero_grad()
    assert float(pipe.train_step(batch)) == pytest.approx(float(Pipeline(config, 1, 2).train_step(batch)), rel=1e-5)


def test_a_mini_batch_that_cannot_be_trained_on_is_refused() -> None:
    config = tiny_config("llama")
    batch, pipe = padded_batch(config), Pipeline(config, 2, 2)
    with pytest.raises(DataError, match="'labels' is missing"):
        pipe.train_step({name: tensor for name, tensor in batch.items() if name != "labels"})
    with pytest.raises(DataError, match="no mini-batch"):
        pipe.train_step(None)
    for name, wrong in (("input_ids", -100), ("input_ids", VOCABULARY), ("labels", VOCABULARY), ("labels", -1)):
        ids = batch[name].clone()
        ids[3, 1] = wrong
        with pytest.raises(DataError, match=f"^{name} has {wrong}, and the model's vocabulary has {VOCABULARY} tokens"):
            pipe.train_step(batch | {name: ids})
    with pytest.raises(DataError, match=r"labels have the shape \(2, 9\) and input_ids \(2, 10\)"):
        Pipeline(config, 1, 3).train_step(batch | {"labels": batch["labels"][:, 1:]})
    with pytest.raises(DataError, match=r"same number of rows, at least one; found .*'labels': 3}$"):
        pipe.train_step(batch | {"labels": batch["labels"][:3]})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_stages": 9}, PartitionError, "9"),
        ({"num_stages": 0}, UserError, "num_stages: found 0"),
        ({"num_micro_batches": 0}, UserError, "num_micro_batches: found 0"),
        ({"schedule": "gpip"}, UserError, "did you mean 'gpipe'"),
        ({"recompute": "all"}, UserError, "recompute: found 'all'"),
        ({"partition": [1, 1]}, PartitionError, "6"),
        ({"memory": "80"}, UserError, "memory is '80', without a unit"),
        ({"torch_compil": True}, UserError, "did you mean 'torch_compile'"),
        ({"num_processes": 2}, UserError, "num_processes is 2 and 1 are running"),
        ({"replicas": 2}, UserError, "replicas is 2 and the number of processes is 1: "),
        ({"replicas": [2, 1]}, UserError, "and there are 1"),
        ({"config": PipelineConfig(2)}, UserError, "config and num_stages are given; put num_stages into the config"),
        ({"device": "cuda"}, UserError, "CUDA"),
        ({"device": "gpu"}, UserError, "'gpu'"),
        ({"label_smoothing": 1.5}, UserError, "label_smoothing=1.5"),
        ({"config_overrides": {"rms_norm_eps": 1.0}}, UserError, "config_overrides"),
    ],
)
def test_arguments_that_cannot_be_honoured(arguments: dict, error: type[HfGpipeError], message: str) -> None:
    if arguments.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(error, match=message):
        Pipeline(tiny_config("llama"), **{"num_stages": 2} | arguments)


def test_nested_dropout_does_not_depend_on_the_split_or_on_recomputation() -> None:
    """The rate of a composite configuration stands inside its text configuration."""
    text = {
        **{"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "attention_dropout": 0.5},
    }
    config = Gemma3Config(text_config=text, vision_config={"hidden_size": 12, "num_hidden_layers": 1})
    batch = padded_batch(tiny_config("llama"))
    results = [
        run_pipeline(Pipeline(config, k, 3, recompute=mode, dtype=torch.float64, attn_implementation="eager"), batch)
        for k, mode in [(1, "none"), (2, "stage"), (3, "block")]
    ]
    for result in results[1:]:
        assert_same(result, results[0])


def _changed(change: Callable[[PreTrainedModel], object]) -> PreTrainedModel:
    model = plain_model(tiny_config("llama", tied=True))
    change(model)
    return model


class _Doubled(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: setattr(m.config, "rms_norm_eps", 0.1),
            "variance_epsilon=1e-06 and stages made by its configuration have 0.1",
        ),
        (lambda m: setattr(m.model.layers[0].mlp.down_proj, "__class__", _Doubled), "is a _Doubled"),
        (lambda m: m.model.norm.register_forward_hook(lambda *call: None), "forward hooks"),
        (lambda m: setattr(m.model.layers[0].mlp, "extra", torch.nn.Linear(2, 2)), "mlp.extra"),
        (lambda m: setattr(m.lm_head, "bias", torch.nn.Parameter(torch.zeros(VOCABULARY))), "lm_head.bias"),
        (lambda m: setattr(m.lm_head, "weight", torch.nn.Parameter(torch.zeros(VOCABULARY, 16))), "tie"),
    ],
)
def test_a_model_that_is_not_its_configuration_is_refused(
    change: Callable[[PreTrainedModel], object], message: str
) -> None:
    """Stages are built from the configuration: a change of the modules alone would be lost without a word."""
    with pytest.raises(UserError, match=message):
        Pipeline(_changed(change), 2)


def test_resized_embeddings_are_taken() -> None:
    model = plain_model(tiny_config("llama"))
    model.resize_token_embeddings(VOCABULARY + 7)
    batch = padded_batch(model.config)
    assert_same(run_pipeline(Pipeline(model, 2, 2), batch), run_plain(model, batch, 2))


def test_freezing_after_the_pipeline_was_made_is_refused() -> None:
    config = tiny_config("llama")
    batch, pipe = padded_batch(config), Pipeline(config, 2, 2)
    next(pipe.parameters()).requires_grad_(False)
    with pytest.raises(UserError, match="requires_grad was True when the Pipeline was made"):
        pipe.train_step(batch)


def test_other_heads_are_refused() -> None:
    message = "LlamaForQuestionAnswering is no class of AutoModelForCausalLM"
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        Pipeline(LlamaForQuestionAnswering(tiny_config("llama")), 2)
    # Models of sound have it too.
    assert "ForConditionalGeneration" not in str(caught.value)


def _stale_copies() -> tuple[float, float]:
    """Weights change between two evaluations."""
    config = tiny_config("llama", tied=True)
    batch, pipe = padded_batch(config), Pipeline(plain_model(config), 2, 2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    pipe.train_step(batch)
    before = pipe.eval_step(batch).loss
    optimizer.step()
    return before, pipe.eval_step(batch).loss


def test_copies_of_tied_weights_are_never_stale() -> None:
    config = tiny_config("llama", tied=True)
    batch, plain = padded_batch(config), plain_model(config)
    before = run_plain(plain, batch, 1).loss
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    after = run_plain(plain, batch, 1).loss
    for losses in run_gloo(_stale_copies, 2):
        assert losses == pytest.approx((before, after), rel=1e-9)


def _on_two_processes(family: str, tied: bool) -> list[tuple[int, int, object]]:
    config = tiny_config(family, tied=tied)
    batch, plain = padded_batch(config), plain_model(config)
    results = []
    for num_stages, num_micro_batches, schedule in [(2, 1, "gpipe"), (2, 4, "gpipe_fused"), (4, 7, "1f1b")]:
        pipe = Pipeline(copy.deepcopy(plain), num_stages, num_micro_batches, schedule=schedule)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        first = run_pipeline(pipe, batch if pipe.world.is_main else None)
        norm = float(pipe.clip_grad_norm_(1e9))
        optimizer.step()
        second = run_pipeline(pipe, batch if pipe.world.is_main else None)
        results.append((num_micro_batches, first, norm, second))
    return results


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("marian", True), ("m2m_100", False)])
def test_two_gloo_processes(family: str, tied: bool) -> None:
    """Two steps: the second shows that copies of tied parameters got the owner's new value."""
    config = tiny_config(family, tied=tied)
    batch = padded_batch(config)
    for results in run_gloo(_on_two_processes, 2, family, tied):
        for num_micro_batches, first, norm, second in results:
            plain = plain_model(config)
            expected = run_plain(plain, batch, num_micro_batches)
            assert_same(first, expected)
            assert norm == pytest.approx(expected.norm, rel=1e-10)
            torch.optim.SGD(plain.parameters(), lr=0.5).step()
            assert_same(second, run_plain(plain, batch, num_micro_batches))


@pytest.mark.parametrize("family", ["marian", "bart", "gpt2"])
def test_rows_longer_than_the_table_of_positions_are_told(family: str) -> None:
    if family == "gpt2":
        config = GPT2Config(n_embd=8, n_head=2, n_layer=2, n_positions=9, vocab_size=VOCABULARY, bos_token_id=1)
    else:
        config = tiny_config(family, max_position_embeddings=9)
    pipe = Pipeline(config, 2, 2)
    batch = {name: torch.full((2, 10), 3) for name in ("input_ids", "labels")}
    with pytest.raises(DataError, match=r"is 10 tokens long, and the (en|de)coder has positions for 9"):
        pipe.train_step(batch)
    pipe.train_step({name: tensor[:, :9] for name, tensor in batch.items()})
