"""Distillation in stages: loss and gradients of a plain loop over both models, and TRL's numbers of GKD."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import Gemma2Config, GPT2Config, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config

from hf_gpipe import DistillationLoss, Pipeline, PipelineConfig
from hf_gpipe.data import PairCollator
from hf_gpipe.errors import UserError
from hf_gpipe.modes.teacher.logits import TeacherLogits
from hf_gpipe.modes.teacher.stage import StageWithTeacher
from hf_gpipe.planner.costs.tracker import Tracker
from hf_gpipe.planner.report import report
from hf_gpipe.runtime import head
from hf_gpipe.runtime.cutting import split_rows
from tests.data.chat_templates import tokenizer
from tests.gloo import run_gloo
from tests.oracle import VOCABULARY, Batch, Result, assert_same, padded_batch, plain_model, run_pipeline, tiny_config
from tests.training.toy import CausalRows, Recorder, arguments, trained_alike

SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}


def student(family: str = "llama", **options: Any) -> PreTrainedModel:
    if family == "llama":
        return plain_model(tiny_config("llama", **options))
    gemma = Gemma2Config(
        **SIZES, hidden_size=16, intermediate_size=32, num_hidden_layers=3, query_pre_attn_scalar=8, **options
    )
    gemma.final_logit_softcapping = 3.0
    return plain_model(gemma)


def teacher(family: str = "llama") -> PreTrainedModel:
    """Of another width and depth, and far from the student."""
    kind = {"llama": LlamaConfig, "qwen3": Qwen3Config}[family]
    made = plain_model(kind(**SIZES, hidden_size=24, intermediate_size=40, num_hidden_layers=5), seed=7)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return made


def divergence(loss: DistillationLoss, z: torch.Tensor, zt: torch.Tensor) -> torch.Tensor:
    """TRL's generalized_jsd_loss before its reduction, of each position."""
    q, p = (torch.log_softmax(one / loss.temperature, -1) for one in (z, zt))

    def kl(of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        return F.kl_div(to, of, reduction="none", log_target=True).sum(-1)

    if loss.beta in (0, 1):
        return kl(p, q) if loss.beta == 0 else kl(q, p)
    m = torch.log((1 - loss.beta) * q.exp() + loss.beta * p.exp())
    return loss.beta * kl(p, m) + (1 - loss.beta) * kl(q, m)


def by_plain_loop(
    model: PreTrainedModel, other: PreTrainedModel, batch: Batch, loss: DistillationLoss, count: int = 1
) -> Result:
    model.zero_grad()
    total, num_targets = 0.0, int((batch["labels"][:, 1:] != -100).sum())
    for part in split_rows(batch, count):
        inputs = {name: part[name] for name in ("input_ids", "attention_mask")}
        z, zt = (one(**inputs, use_cache=False).logits[:, :-1] for one in (model, other.eval()))
        labels, share = part["labels"][:, 1:], loss.cross_entropy_share
        ce = F.cross_entropy(z.transpose(1, 2), labels, reduction="none")
        each = share * ce + (1 - share) * divergence(loss, z, zt.detach())
        value = each[labels != -100].sum() / num_targets
        value.backward()
        total += value.item()
    return Result(total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


CASES = [
    (1, 1, "gpipe", "none", DistillationLoss(beta=0.0)),
    (2, 2, "1f1b", "stage", DistillationLoss(beta=1.0, temperature=2.0)),
    (3, 3, "gpipe", "block", DistillationLoss(beta=0.3, temperature=0.5, cross_entropy_share=0.4)),
    (3, 4, "zb_h1", "none", DistillationLoss(beta=0.5, temperature=2.0)),
    (3, 4, "1f1b", "stage", DistillationLoss(beta=0.0, cross_entropy_share=1.0)),
]


@pytest.mark.parametrize(("num_stages", "count", "schedule", "recompute", "loss"), CASES)
def test_loss_and_every_gradient(
    num_stages: int, count: int, schedule: str, recompute: str, loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "slice_positions", lambda width, vocabulary: 5)
    made, of = [], TeacherLogits.of
    monkeypatch.setattr(TeacherLogits, "of", lambda self, rows: made.append(of(self, rows)) or made[-1])
    plain, other = student(tied=num_stages != 2), teacher()
    batch = padded_batch(plain.config)
    expected = by_plain_loop(copy.deepcopy(plain), other, batch, loss)
    pipe = Pipeline(plain, num_stages, count, schedule, recompute, loss=loss, teacher=other)
    assert_same(run_pipeline(pipe, batch), expected)
    assert pipe.eval_step(batch).loss == pytest.approx(expected.loss, rel=1e-10)
    assert 1 <= max(len(one) for one in made) <= 5  # positions of which there are logits together
    assert not {name for name, _ in pipe.named_parameters()} - {name for name, _ in plain.named_parameters()}


def test_other_families_of_another_width_and_depth(tmp_path: Path) -> None:
    """Gemma 2's soft cap on the student's logits, and a teacher of Qwen 3 that is read from files."""
    plain, other = student("gemma2"), teacher("qwen3")
    other.save_pretrained(tmp_path)
    batch, loss = padded_batch(plain.config), DistillationLoss(beta=0.7, temperature=1.5, cross_entropy_share=0.2)
    expected = by_plain_loop(copy.deepcopy(plain), other, batch, loss, count=2)
    pipe = Pipeline(plain, 3, 2, "1f1b", "stage", loss=loss, teacher=tmp_path, attn_implementation="eager")
    found = run_pipeline(pipe, batch)
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    # Gemma's norms sum the gradients of their weights in float32, over columns of padding too.
    assert_same(found, expected, 1e-8)
    pipe.save_pretrained(tmp_path / "student")
    assert type(plain).from_pretrained(tmp_path / "student").config.num_hidden_layers == 3


def _distilled(num_stages: int, replicas: int) -> Result:
    config = PipelineConfig(num_stages=num_stages, num_micro_batches=4, replicas=replicas, schedule="1f1b")
    plain = student(tied=False)
    pipe = Pipeline(plain, config=config, loss=DistillationLoss(beta=0.5), teacher=teacher(), device="cpu")
    return run_pipeline(pipe, padded_batch(plain.config))


@pytest.mark.parametrize(("num_stages", "replicas"), [(2, 1), (1, 2)])
def test_two_processes(num_stages: int, replicas: int) -> None:
    plain = student(tied=False)
    expected = by_plain_loop(plain, teacher(), padded_batch(plain.config), DistillationLoss(beta=0.5))
    for found in run_gloo(_distilled, 2, num_stages, replicas):
        assert_same(found, expected)


def test_the_trainer(tmp_path: Path) -> None:
    """Some steps lead the student to the teacher."""
    from hf_gpipe import PipelineTrainer

    loss = DistillationLoss(beta=0.0)
    pipe = Pipeline(student(tied=False), 2, 2, loss=loss, teacher=teacher())
    args = arguments(tmp_path, max_steps=12, learning_rate=0.05, logging_steps=1)
    options: dict[str, Any] = {"train_dataset": CausalRows(8), "eval_dataset": CausalRows(8)}
    trainer = PipelineTrainer(
        pipe,
        args,
        data_collator=PairCollator(0),
        compute_metrics=lambda seen: {"positions": float(seen.predictions.shape[1])},
        **options,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    found = trainer.evaluate()
    assert found["eval_loss"] < 0.8 * before
    # With metrics of the student's logits the loss stays the divergence.
    trainer.compute_metrics = None
    assert trainer.evaluate()["eval_loss"] == pytest.approx(found["eval_loss"], rel=1e-12)
    assert trainer.predict(CausalRows(8)).predictions.shape[1] == found["eval_positions"]


def _tracked(**options: Any) -> tuple[int, Any, Any]:
    """The peak of live bytes of a step beyond weights and gradients, its plan, and the pipeline."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 2000, "num_attention_heads": 2, "tie_word_embeddings": False}
    models = [
        LlamaForCausalLM(LlamaConfig(**sizes, hidden_size=width, intermediate_size=width, num_hidden_layers=layers))
        for width, layers in ((32, 3), (64, 5))
    ]
    if "loss" in options:
        options["teacher"] = models[1]
    pipe = Pipeline(models[0], 2, 4, "1f1b", "stage", **options)
    ids = torch.randint(5, 2000, (8, 64))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    pipe.train_step(batch)
    tracker = Tracker()
    for stage in pipe.stages.values():
        for model in (stage.model.model, *([stage._teacher.model] if isinstance(stage, StageWithTeacher) else [])):
            tracker.ignore([*model.parameters(), *model.buffers()])
            tracker.ignore(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    with tracker, tracker.phase() as phase:
        pipe.train_step(batch)
    return max(phase.levels), pipe.plan(batch), pipe


def test_the_plan_knows_the_teacher() -> None:
    """Beyond the student's own, a step needs the teacher's weights and two chunks of logits at most."""

    def comes_and_goes(plan: Any) -> int:
        memory = plan.processes[0].memory
        return memory.boundaries + memory.activations + memory.logits + memory.early_gradients + memory.working

    alone, of_student, _ = _tracked()
    peak, plan, pipe = _tracked(loss=DistillationLoss(beta=0.5, cross_entropy_share=0.1))
    chunk = 2 * 64 * 2000 * 4  # the logits of a micro-batch, which are fewer than those of a chunk
    assert chunk <= peak - alone <= 2 * chunk
    for found, expected in ((comes_and_goes(plan), peak), (comes_and_goes(of_student), alone)):
        assert found == pytest.approx(expected, rel=0.01)
    weights = sum(parameter.nbytes for parameter in pipe.decision.companion.adapter.reference.parameters())
    more = plan.processes[0].memory.parameters - of_student.processes[0].memory.parameters
    assert weights <= more < weights + 1000
    assert plan.step_seconds > of_student.step_seconds
    assert "teacher" in report(plan)
    assert "teacher" not in report(of_student)


def test_the_planner_chooses_beside_a_teacher() -> None:
    plain = student(tied=False)
    options: dict[str, Any] = {"loss": DistillationLoss(), "teacher": teacher(), "example": padded_batch(plain.config)}
    pipe = Pipeline(plain, 2, 2, "1f1b", "auto", "auto", **options)
    assert pipe.planned is not None
    assert pipe.plan().fits


def test_what_is_refused() -> None:
    plain, other, loss = student(), teacher(), DistillationLoss()
    for values, message in (
        ({"beta": 1.5}, "beta=1.5: expected a number of at least 0 and at most 1"),
        ({"temperature": 0.0}, "temperature=0.0: expected a number above 0"),
        ({"logit_clipping": 1.0}, "logit_clipping is not supported in distillation"),
        ({"label_smoothing": 0.1}, "is of the cross-entropy, and cross_entropy_share is 0"),
    ):
        with pytest.raises(UserError, match=message):
            DistillationLoss(**values)
    small = plain_model(LlamaConfig(**SIZES | {"vocab_size": 16}, hidden_size=16, num_hidden_layers=3))
    gpt2 = plain_model(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=3, n_head=2, n_positions=4))
    for options, message in (
        ({"teacher": other, "loss": None}, "teacher is given, and the loss, a TokenLoss, does not read it"),
        ({"teacher": None}, "loss is a DistillationLoss, and there is no teacher"),
        ({"teacher": small}, "teacher: it gives 16 logits for a token, and the model"),
        ({"teacher": plain_model(tiny_config("marian"))}, "MarianMTModel cannot be distilled"),
        ({"teacher": plain}, "teacher: it shares .* weights with the model, such as model.embed_tokens.weight"),
        ({"teacher": other.config}, "teacher: a configuration has no weights"),
        ({"packing": True}, "a DistillationLoss is computed from rows, and packed rows are one"),
        ({"sequence_chunks": 2}, "sequence_chunks"),
        ({"schedule": "pipedream"}, "there is a teacher and schedule is pipedream"),
    ):
        given: dict[str, Any] = {"loss": loss, "teacher": other} | options
        with pytest.raises(UserError, match=message):
            Pipeline(plain, 2, 2, **given)
    with pytest.raises(Exception, match="tokens long, and the decoder has positions for 4"):
        Pipeline(plain, 2, 2, loss=loss, teacher=gpt2).train_step(padded_batch(plain.config))


def test_the_numbers_of_trl() -> None:
    pytest.importorskip("trl")
    from trl.experimental.gkd import GKDTrainer

    torch.manual_seed(0)
    z, zt, labels = torch.randn(2, 5, 11), torch.randn(2, 5, 11), torch.randint(0, 11, (2, 5))
    labels[0, :2] = -100
    for beta in (0.0, 0.3, 1.0):
        loss = DistillationLoss(beta=beta, temperature=1.7)
        wanted = GKDTrainer.generalized_jsd_loss(z, zt, labels, beta=beta, temperature=1.7)
        found, _ = loss.with_gradient(z.flatten(0, 1), labels.flatten(), companion=zt.flatten(0, 1))
        assert float(found.sum() / (labels != -100).sum()) == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_thirty_steps_of_trl(beta: float, tmp_path: Path) -> None:
    """TRL's trainer divides by its temperature where it samples, and not in its loss: the temperature is 1 here."""
    pytest.importorskip("trl")
    from datasets import Dataset
    from peft import LoraConfig
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    from hf_gpipe import PipelineTrainer

    common: dict[str, Any] = {
        "max_steps": 30,
        "learning_rate": 2e-3,
        "optim": "adamw_torch",
        "weight_decay": 0.0,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "bf16": False,
        "gradient_checkpointing": False,
    }
    rows = [row | {"labels": [-100, *row["labels"][1:]]} for row in CausalRows(44)]
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    model, other, recorders = student(tied=False).float(), teacher().float(), (Recorder(), Recorder())
    both: dict[str, Any] = {"loss": DistillationLoss(beta=beta), "teacher": copy.deepcopy(other)}
    pipe = Pipeline(copy.deepcopy(model), 2, 2, peft_config=lora, **both)
    ours = PipelineTrainer(
        pipe,
        arguments(tmp_path, **common),
        data_collator=PairCollator(0),
        train_dataset=rows[:40],
        eval_dataset=rows[40:],
        callbacks=[recorders[0]],
    )
    options: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "eos_token": "</s>"}
    theirs = GKDTrainer(
        model,
        other,
        GKDConfig(output_dir=str(tmp_path / "trl"), lmbda=0.0, beta=beta, **common, **options),
        data_collator=PairCollator(0),
        train_dataset=Dataset.from_list(rows[:40]),
        eval_dataset=Dataset.from_list(rows[40:]),
        processing_class=tokenizer(),
        peft_config=lora,
        callbacks=[recorders[1]],
    )
    trained_alike(ours, theirs, recorders, ())
