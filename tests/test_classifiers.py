"""Models that classify or score rows, in stages: loss and gradients of plain transformers, files that it loads."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    DebertaV2Config,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    PreTrainedModel,
    Qwen3Config,
    RobertaConfig,
    T5Config,
    T5ForSequenceClassification,
)

from hf_gpipe import Pipeline, PipelineTrainer, PipelineTrainingArguments
from hf_gpipe.adapters.classifiers import ONE_CLASS
from hf_gpipe.errors import CheckpointError, DataError, UnsupportedModelError, UserError
from tests.oracle import VOCABULARY, Batch, Result, assert_same, run_pipeline
from tests.trainers.test_embeddings import ROWS, words
from tests.training.toy import Recorder, trainer

_COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": 0}
_LLAMA: dict[str, Any] = {**_COMMON, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
_CONFIGS: dict[str, Any] = {
    "llama": lambda **options: LlamaConfig(**_LLAMA, **options),
    "qwen3": lambda **options: Qwen3Config(**_LLAMA, head_dim=8, **options),
    **{
        family: partial(kind, **_COMMON, num_attention_heads=2, intermediate_size=32)
        for family, kind in (("bert", BertConfig), ("roberta", RobertaConfig), ("modernbert", ModernBertConfig))
    },
    "deberta-v2": partial(
        DebertaV2Config, **_COMMON, num_attention_heads=2, intermediate_size=32, pooler_hidden_size=16
    ),
    "gpt2": lambda **options: GPT2Config(
        **_COMMON, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options
    ),
}
MULTI = "multi_label_classification"


def plain(family: str, attention: str = "eager", **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = _CONFIGS[family](**options)
    for name, value in vars(config).items():
        if "dropout" in name and value:
            setattr(config, name, 0.0)
    made: PreTrainedModel = AutoModelForSequenceClassification.from_config(config, attn_implementation=attention)
    return made.double().train()


def batch_of(labels: torch.Tensor, *, left: bool = False) -> Batch:
    """Rows of unequal length, padded on the right or on the left."""
    rows, length = len(labels), 7
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, slice(0, row % 4) if left else slice(length - row % 4, length)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def by_transformers(model: torch.nn.Module, batch: Batch) -> Result:
    """The model's own loss of the whole mini-batch."""
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return Result(loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize(
    ("family", "options", "labels", "left"),
    [
        ("llama", {"num_labels": 3}, torch.tensor([0, 2, 1, -100, 2]), False),
        ("gpt2", {"num_labels": 2}, torch.tensor([1, 0, 1]), True),
        ("qwen3", {"num_labels": 1}, torch.tensor([0.5, -1.0, 2.0, 0.0]), True),
        ("gpt2", {"num_labels": 3, "problem_type": "regression"}, torch.linspace(-1, 1, 12).view(4, 3), False),
        # Encoders, whose heads pool the hidden states in one module, in two, and in a norm and two others.
        ("roberta", {"num_labels": 3}, torch.tensor([0, 2, 1, -100, 2]), False),
        ("bert", {"num_labels": 2}, torch.tensor([1, 0, 1]), True),
        ("modernbert", {"num_labels": 2, "classifier_pooling": "mean"}, torch.tensor([1, 0, 1, 1]), False),
        # Without a problem_type its own loss is in float32.
        ("deberta-v2", {"num_labels": 2, "problem_type": ONE_CLASS}, torch.tensor([1, 0, 1, 1]), False),
        # As many classes as positions, and as rows.
        ("llama", {"num_labels": 7, "problem_type": MULTI}, torch.eye(7), False),
    ],
)
def test_loss_and_gradients_are_those_of_the_plain_model(
    family: str, options: Any, labels: torch.Tensor, left: bool, tmp_path: Path
) -> None:
    labels = labels.double() if labels.is_floating_point() else labels
    batch = batch_of(labels, left=left)
    # With eager attention transformers gives NaN for rows in float64 that are padded on the left.
    attention = "sdpa" if left else "eager"
    model = plain(family, attention, **options)
    expected = by_transformers(copy.deepcopy(model), batch)
    pipe = Pipeline(model, 2, 2, recompute="stage" if left else "none")
    assert_same(run_pipeline(pipe, batch), expected)
    assert pipe.eval_step(batch).loss == pytest.approx(expected.loss, rel=1e-10)
    assert pipe.plan(batch).peak_bytes > 0

    pipe.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert {name: torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items()} == (
        dict.fromkeys(model.state_dict(), True)
    )
    again = Pipeline(tmp_path, 3, 2, attn_implementation=attention)
    assert again.eval_step(batch).loss == pytest.approx(expected.loss, rel=1e-10)


def test_lora_trains_the_head_too_and_is_saved_as_by_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = plain("llama", num_labels=3)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"], init_lora_weights=False)
    batch = batch_of(torch.tensor([0, 2, 1, 2]))
    # Of its four layers a stage has the head alone.
    pipe = Pipeline(copy.deepcopy(model), 2, 2, partition=[4, 1], peft_config=config)
    found = run_pipeline(pipe, batch)
    pipe.save_pretrained(tmp_path)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path, is_trainable=True).double()
    expected = by_transformers(adapted.get_base_model(), batch)
    assert "score.modules_to_save.default.weight" in expected.gradients
    assert_same(found, expected)
    assert_same(run_pipeline(Pipeline(adapted, 2, 2), batch), expected)
    both = Pipeline(plain("llama"), 2, peft_config=peft.LoraConfig(task_type="SEQ_CLS", modules_to_save=["norm"]))
    trained = {name for name, parameter in both.named_parameters() if parameter.requires_grad}
    assert {"score.modules_to_save.default.weight", "model.norm.modules_to_save.default.weight"} <= trained


def test_a_language_model_s_checkpoint_gets_a_new_head(tmp_path: Path) -> None:
    LlamaForCausalLM(_CONFIGS["llama"]()).save_pretrained(tmp_path)
    overrides = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}
    common: dict[str, Any] = {"dtype": torch.float64, "attn_implementation": "eager"}
    pipes = [Pipeline(tmp_path, stages, 2, config_overrides=overrides, **common) for stages in (1, 2)]
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3, **common)
    with torch.no_grad():
        plain.score.weight.copy_(pipes[0].model.score.weight)
    assert plain.score.weight.std() > 0
    batch = batch_of(torch.tensor([0, 2, 1]))
    for pipe in pipes:
        assert pipe.eval_step(batch).loss == pytest.approx(plain(**batch).loss.item(), rel=1e-10)
    pipes[1].adapter.may_lack_head = False
    with pytest.raises(CheckpointError, match=r"lacks 1 parameters of the model: score.weight"):
        pipes[1].load_pretrained(tmp_path)


def test_an_encoder_s_checkpoint_gets_a_new_pooler_too(tmp_path: Path) -> None:
    """It has none where it comes from a masked language model; new weights depend on no split."""
    BertForMaskedLM(_CONFIGS["bert"]()).save_pretrained(tmp_path)
    overrides = {"architectures": ["BertForSequenceClassification"], "num_labels": 3}
    batch = batch_of(torch.tensor([0, 2, 1]))
    pipes = [Pipeline(tmp_path, stages, 2, config_overrides=overrides, dtype=torch.float64) for stages in (1, 2)]
    first, second = (pipe.eval_step(batch).loss for pipe in pipes)
    assert first == pytest.approx(second, rel=1e-10)
    assert pipes[0].model.bert.pooler.dense.weight.std() > 0


def test_the_trainer_learns_classes_and_gives_logits(tmp_path: Path) -> None:
    rows = [{"input_ids": [3 + number % 2] * (2 + number % 3), "label": number % 2} for number in range(16)]

    def collate(examples: list[dict[str, Any]]) -> Batch:
        longest = max(len(one["input_ids"]) for one in examples)
        ids = torch.tensor([one["input_ids"] + [0] * (longest - len(one["input_ids"])) for one in examples])
        labels = torch.tensor([one["label"] for one in examples])
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}

    def accuracy(prediction: Any) -> dict[str, float]:
        assert prediction.predictions.shape == (16, 2)
        return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}

    made = trainer(
        tmp_path,
        model=plain("llama", num_labels=2).float(),
        data_collator=collate,
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=accuracy,
        max_steps=8,
        learning_rate=0.05,
        num_micro_batches="auto",
    )
    made.train()
    assert made.evaluate()["eval_accuracy"] == 1
    made.args.predict_with_generate = True
    with pytest.raises(UserError, match="LlamaForSequenceClassification has no head for tokens, and cannot generate"):
        made.evaluate()


def test_pairs_are_learnt_as_by_a_cross_encoder(tmp_path: Path) -> None:
    """Twenty steps of sentence-transformers' own trainer, in float64, with the binary cross-entropy of a score."""
    library = pytest.importorskip("sentence_transformers")
    from datasets import Dataset
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
    from torch.utils.data import BatchSampler, SequentialSampler

    scores = {"positive": 1.0, "negative": 0.2}
    pairs = [(row["anchor"], row[name], score) for row in ROWS for name, score in scores.items()]
    tokenizer = words()
    start = plain("bert", num_labels=1, problem_type=MULTI, vocab_size=len(tokenizer))
    start.save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    common: dict[str, Any] = {"max_steps": 20, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    common |= {"per_device_train_batch_size": 6, "logging_steps": 1, "save_strategy": "no", "use_cpu": True}
    reranker = library.CrossEncoder(str(tmp_path / "start"), device="cpu", model_kwargs={"dtype": torch.float64})
    recorder = Recorder()
    theirs = library.CrossEncoderTrainer(
        model=reranker,
        args=library.CrossEncoderTrainingArguments(
            output_dir=str(tmp_path / "theirs"), report_to="none", disable_tqdm=True, **common
        ),
        train_dataset=Dataset.from_list([{"query": a, "text": b, "label": score} for a, b, score in pairs]),
        loss=BinaryCrossEntropyLoss(reranker),
        callbacks=[recorder],
    )
    theirs.get_batch_sampler = lambda dataset, batch_size, drop_last, **others: BatchSampler(
        SequentialSampler(dataset), batch_size, drop_last
    )
    theirs.train()
    rows = [{**tokenizer(a, b), "labels": [score]} for a, b, score in pairs]
    made = PipelineTrainer(
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "start", dtype="float64"),
        PipelineTrainingArguments(
            output_dir=str(tmp_path / "ours"),
            num_stages=2,
            num_micro_batches=3,
            train_sampling_strategy="sequential",
            **common,
        ),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    made.train()
    losses = [line["loss"] for line in made.state.log_history if "loss" in line]
    assert losses == pytest.approx(recorder.losses, abs=1e-6, rel=0)
    assert len(losses) == 20
    made.save_model(str(tmp_path / "saved"))
    saved = library.CrossEncoder(str(tmp_path / "saved"), device="cpu")
    texts = [(a, b) for a, b, _ in pairs]
    np.testing.assert_allclose(saved.predict(texts), reranker.predict(texts), rtol=0, atol=1e-6)


def test_refusals() -> None:
    sizes = {"vocab_size": VOCABULARY, "num_heads": 2, "num_layers": 2}
    with pytest.raises(UnsupportedModelError, match="t5: T5ForSequenceClassification cannot be split"):
        Pipeline(T5ForSequenceClassification(T5Config(**sizes, d_model=16, d_kv=8, d_ff=32)), 2, 2)
    distilbert = DistilBertConfig(vocab_size=VOCABULARY, dim=16, n_layers=2, n_heads=2, hidden_dim=32)
    with pytest.raises(UnsupportedModelError, match="distilbert: DistilBertForSequenceClassification cannot be split"):
        Pipeline(DistilBertForSequenceClassification(distilbert), 2, 2)
    model = plain("llama", num_labels=2)
    model.config.pad_token_id = None
    with pytest.raises(UnsupportedModelError, match="give it the tokenizer's: from_pretrained"):
        Pipeline(model, 2, 2)
    model.config.pad_token_id = 0
    with pytest.raises(UserError, match="makes one output of each row, and packed rows are one"):
        Pipeline(model, 2, 2, packing=True)
    pipe = Pipeline(model, 2, 2)
    for labels, message in (
        (torch.tensor([0, 2]), "labels has 2, and the model has 2 classes"),
        (torch.eye(2), r"labels have the shape \(1, 2\) .* set problem_type to 'multi_label_classification'"),
    ):
        with pytest.raises(DataError, match=message):
            pipe.train_step(batch_of(labels))
    model.config.problem_type = MULTI
    with pytest.raises(UserError, match="label_smoothing of the cross-entropy cannot go with the model's problem_type"):
        Pipeline(model, 2, 2, label_smoothing=0.1)
    with pytest.raises(DataError, match="for multi_label_classification they are floats, 2 for each row"):
        Pipeline(model, 2, 2).train_step(batch_of(torch.tensor([0, 1])))
