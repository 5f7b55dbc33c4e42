"""Embeddings: loss and every gradient of the whole mini-batch, for any number of micro-batches, stages and replicas."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    BloomConfig,
    BloomModel,
    ElectraConfig,
    ElectraModel,
    GPT2Config,
    GPT2Model,
    LlamaForCausalLM,
    LlamaModel,
)

from hf_gpipe import (
    EmbeddingLoss,
    Loss,
    LossInputs,
    Pipeline,
    PipelineEmbeddingConfig,
    PipelineEmbeddingTrainer,
    Reads,
)
from hf_gpipe.checkpoint.sentence_files import SentenceFiles
from hf_gpipe.data.embedding_examples import EmbeddingCollator, EmbeddingExamples, embedded_of
from hf_gpipe.errors import DataError, UnsupportedModelError, UserError
from hf_gpipe.from_recipe.checks import check_model, loss_of
from hf_gpipe.from_recipe.held_out import HeldOut
from hf_gpipe.from_recipe.job import _finite
from hf_gpipe.pipeline.exactness import compare
from hf_gpipe.planner.report import report
from hf_gpipe.recipe import parse_recipe
from hf_gpipe.tasks.embeddings import evaluate_embeddings
from tests.data.chat_templates import tokenizer
from tests.gloo import run_gloo
from tests.oracle import (
    VOCABULARY,
    Result,
    assert_same,
    gathered_gradients,
    padded_batch,
    plain_model,
    run_pipeline,
    tiny_config,
)
from tests.training.toy import TWO_STAGES, Recorder, weights

SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 16}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, Any] = {
    "bert": lambda: BertModel(BertConfig(**SMALL, **NO_DROPOUT, intermediate_size=32)),
    "dropout": lambda: BertModel(BertConfig(**SMALL, intermediate_size=32)),
    "electra": lambda: ElectraModel(ElectraConfig(**SMALL, **NO_DROPOUT, intermediate_size=32, embedding_size=8)),
    "llama": lambda: LlamaModel(tiny_config("llama")),
    "gpt2": lambda: GPT2Model(GPT2Config(**SMALL, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
}


def plain(family: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[family]().double().train()
    return model


def rows(count: int, *, left: bool = False) -> dict[str, torch.Tensor]:
    """Rows of 3 to 9 tokens, and a score for each."""
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(3, VOCABULARY, (count, 9), generator=generator)
    lengths = torch.randint(3, 10, (count,), generator=generator)
    mask = (torch.arange(9) < lengths[:, None]).long()
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    batch = {name: tensor.flip(1) for name, tensor in batch.items()} if left else batch
    return batch | {"labels": torch.rand(count, generator=generator)}


def embeddings(model: Any, batch: dict[str, torch.Tensor], pooling: str) -> torch.Tensor:
    """Pooled in another way than by the package."""
    hidden = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    used = [row[mask.bool()] for row, mask in zip(hidden, batch["attention_mask"], strict=True)]
    if pooling == "cls":
        return hidden[:, 0]
    return torch.stack([row[-1] if pooling == "lasttoken" else row.mean(0) for row in used])


def expected_loss(model: Any, batch: dict[str, torch.Tensor], loss: EmbeddingLoss) -> torch.Tensor:
    whole = embeddings(model, batch, loss.pooling)
    total = torch.zeros((), dtype=whole.dtype)
    for place, size in enumerate(loss.matryoshka_dims or (whole.shape[1],)):
        cut = F.normalize(whole[:, :size], dim=1) if loss.matryoshka_dims else whole
        first, second, *others = (cut[number :: loss.texts] for number in range(loss.texts))
        if loss.loss_type == "cosine":
            value = F.mse_loss(F.cosine_similarity(first, second), batch["labels"][::2].double())
        elif loss.loss_type == "cosent":
            cosines, scores = loss.scale * F.cosine_similarity(first, second), batch["labels"][::2].tolist()
            wrong = [
                cosines[i] - cosines[j] for i, low in enumerate(scores) for j, high in enumerate(scores) if low < high
            ]
            value = torch.stack(wrong).exp().sum().log1p()
        elif loss.loss_type == "triplet":
            value = F.relu((first - second).norm(dim=1) - (first - others[0]).norm(dim=1) + loss.margin).mean()
        else:
            scores = F.cosine_similarity(first[:, None], torch.cat([second, *others])[None], dim=2) * loss.scale
            value = F.cross_entropy(scores, torch.arange(len(first)))
        total = total + value * (loss.matryoshka_weights[place] if loss.matryoshka_weights else 1)
    return total


CASES = (
    ("bert", EmbeddingLoss(), 8),
    ("llama", EmbeddingLoss(pooling="lasttoken", texts=3, matryoshka_dims=(16, 4), matryoshka_weights=(1.0, 0.5)), 5),
    ("gpt2", EmbeddingLoss("triplet", "lasttoken", 3, margin=0.4), 5),
    ("electra", EmbeddingLoss("cosine", "cls"), 7),
    ("llama", EmbeddingLoss("multiple_negatives", "mean", 4, scale=5.0), 3),
    ("bert", EmbeddingLoss("cosent", "cls", scale=3.0), 7),
)


@pytest.mark.parametrize(("family", "loss", "examples"), CASES)
def test_loss_and_every_gradient(family: str, loss: EmbeddingLoss, examples: int) -> None:
    model, batch = plain(family), rows(examples * loss.texts, left=family == "llama" and loss.pooling == "lasttoken")
    value = expected_loss(model, batch, loss)
    value.backward()
    expected = Result(
        float(value.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    )
    draw = random.Random(examples)
    for num_stages, count in ((1, 1), (2, 2), (3, 8), (2, 5)):
        schedule, recompute = draw.choice(("gpipe", "1f1b", "zb_h1")), draw.choice(("none", "stage", "block"))
        recompute = "none" if schedule == "zb_h1" else recompute
        options: Any = {"loss": loss, "length_bucketing": draw.random() < 0.5}
        pipe = Pipeline(copy.deepcopy(model), num_stages, count, schedule, recompute, **options)
        pipe.zero_grad()
        assert_same(run_pipeline(pipe, batch), expected)
        assert pipe.eval_step(batch).loss == pytest.approx(expected.loss, rel=1e-10)


def test_rows_with_labels_of_tokens() -> None:
    """Micro-batches are as wide as their longest row, and so are their labels."""
    model = plain_model(tiny_config("llama"))
    batch = {name: tensor[:4] for name, tensor in padded_batch(model.config).items()}
    whole, cut = (
        run_pipeline(Pipeline(copy.deepcopy(model), 2, count, loss=EmbeddingLoss()), batch) for count in (1, 2)
    )
    assert_same(cut, whole)


class InOnePass(Loss):
    """The same loss of a mini-batch that is never cut."""

    reads = Reads.HIDDEN

    def __init__(self, loss: EmbeddingLoss, rows_per_unit: int) -> None:
        self.loss, self.rows_per_unit = loss, rows_per_unit

    def unit_losses(self, read: LossInputs) -> torch.Tensor:
        return self.loss.compare(self.loss.embed(read), read.inputs["labels"]).mean()[None]


def test_both_passes_have_the_same_dropout() -> None:
    """One micro-batch against one pass; several on one stage and on three; accumulated mini-batches are apart."""
    model, loss, batch = plain("dropout"), EmbeddingLoss(scale=3.0), rows(12)
    one_pass = run_pipeline(Pipeline(copy.deepcopy(model), 3, 1, loss=InOnePass(loss, 12)), batch)
    assert_same(run_pipeline(Pipeline(copy.deepcopy(model), 2, 1, loss=loss), batch), one_pass)
    assert_same(
        run_pipeline(Pipeline(copy.deepcopy(model), 3, 4, "1f1b", loss=loss), batch),
        run_pipeline(Pipeline(copy.deepcopy(model), 1, 4, loss=loss), batch),
    )
    quiet = plain("bert")
    parts = [{name: tensor[start : start + 6] for name, tensor in batch.items()} for start in (0, 6)]
    value = torch.stack([expected_loss(quiet, part, loss) for part in parts]).mean()
    value.backward()
    pipe = Pipeline(copy.deepcopy(quiet), 2, 2, loss=loss)
    pipe.zero_grad()
    found = pipe.train_step(parts)
    gradients = {name: p.grad for name, p in quiet.named_parameters() if p.grad is not None}
    assert_same(Result(float(found), gathered_gradients(pipe)), Result(float(value.detach()), gradients))


def _in_replicas(loss: EmbeddingLoss, counts: tuple[int, ...]) -> list[tuple[Result, float, torch.Tensor]]:
    found = []
    for count in counts:
        pipe, batch = Pipeline(plain("bert"), 1, 4, replicas=2, loss=loss), rows(count)
        found.append((run_pipeline(pipe, batch), pipe.eval_step(batch).loss, pipe.embed(batch)))
    return found


def test_replicas_compare_all_rows_of_the_mini_batch() -> None:
    """With five examples, and with one, of which a replica has none."""
    loss, counts = EmbeddingLoss(texts=3), (15, 3)
    of_replicas = run_gloo(_in_replicas, 2, loss, counts)
    for place, count in enumerate(counts):
        model, batch = plain("bert"), rows(count)
        value = expected_loss(model, batch, loss)
        value.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        expected = Result(float(value.detach()), gradients)
        for found, evaluated, embedded in (one[place] for one in of_replicas):
            assert_same(found, expected)
            assert evaluated == pytest.approx(expected.loss, abs=1e-10)
            torch.testing.assert_close(embedded, embeddings(model, batch, "mean").detach(), rtol=0, atol=1e-10)


ROWS = [
    {"anchor": f"the {animal} {verb}", "positive": f"{animal} that {verb}", "negative": f"{other} and {verb}"}
    for animal, other in (("cat", "dog"), ("dog", "cow"), ("cow", "cat"))
    for verb in ("runs", "sleeps", "eats", "sings", "falls", "waits")
]


def trained(folder: Path, model: Any, data: list[dict[str, Any]], **values: Any) -> tuple[Any, list[dict[str, Any]]]:
    common: dict[str, Any] = {
        **TWO_STAGES,
        "max_steps": 3,
        "per_device_train_batch_size": 6,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "use_cpu": True,
    }
    recorder = Recorder()
    made = PipelineEmbeddingTrainer(
        model,
        PipelineEmbeddingConfig(output_dir=str(folder), **common | values),
        train_dataset=data,
        processing_class=words(),
        callbacks=[recorder],
    )
    made.train()
    return made, recorder.logs


def words() -> Any:
    made = tokenizer()
    made.pad_token = made.eos_token
    return made


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("bert", {"pooling": "cls", "matryoshka_dims": [16, 4]}),
        ("llama", {"pooling": "lasttoken", "texts": 3, "scale": 10.0}),
    ],
)
def test_training_against_a_plain_loop(tmp_path: Path, family: str, values: dict[str, Any]) -> None:
    """And the saved directory has the parts that sentence-transformers loads."""
    data = ROWS if values.get("texts") == 3 else [{name: row[name] for name in ("anchor", "positive")} for row in ROWS]
    torch.manual_seed(0)
    config = MODELS[family]().config
    config.vocab_size, config.max_position_embeddings = len(words()), 64
    model = type(MODELS[family]())(config).double().train()
    start, loss = copy.deepcopy(model), PipelineEmbeddingConfig(output_dir=str(tmp_path), **values).make_loss()
    examples = EmbeddingExamples(data, words())
    collate = EmbeddingCollator(words().pad_token_id, loss.texts)
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(3):
        value = expected_loss(model, collate([examples[i] for i in range(6 * step, 6 * step + 6)]), loss)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(value.item())
    made, logs = trained(tmp_path / "out", start, data, **values)
    assert [one["loss"] for one in logs if "loss" in one] == pytest.approx(expected, abs=1e-7)
    assert all(0 <= one["accuracy"] <= 1 for one in logs if "loss" in one)
    found = weights(made)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-7, msg=name)
    made.save_model(str(tmp_path / "saved"))
    again = AutoModel.from_pretrained(tmp_path / "saved", dtype="float64")
    assert type(again) is type(model)
    modules = json.loads((tmp_path / "saved/modules.json").read_text())
    assert [(one["path"], one["type"].rpartition(".")[2]) for one in modules] == [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
    ]
    pooling = json.loads((tmp_path / "saved/1_Pooling/config.json").read_text())
    assert [name for name, value in pooling.items() if value is True] == [
        {"cls": "pooling_mode_cls_token", "lasttoken": "pooling_mode_lasttoken"}[loss.pooling]
    ]


def sentence_folder(folder: Path, pooling: dict[str, Any] | None = None, modules: str = "Pooling Normalize") -> Path:
    """A model as sentence-transformers saves it: texts of 6 tokens in small letters, pooled at the first token."""
    torch.manual_seed(0)
    BertModel(BertConfig(**SMALL | {"vocab_size": len(words())}, **NO_DROPOUT, intermediate_size=32)).save_pretrained(
        folder
    )
    words().save_pretrained(folder)
    paths = {name: f"{number}_{name}" for number, name in enumerate(["", *modules.split()])} | {"Transformer": ""}
    names = ["Transformer", *modules.split()]
    kind = "sentence_transformers.models"
    contents: dict[str, Any] = {
        "modules.json": [
            {"idx": number, "name": str(number), "path": paths[name], "type": f"{kind}.{name}"}
            for number, name in enumerate(names)
        ],
        "sentence_bert_config.json": {"max_seq_length": 6, "do_lower_case": True},
        "config_sentence_transformers.json": {
            "prompts": {"query": "q: "},
            "default_prompt_name": "query",
            "similarity_fn_name": "dot",
        },
        "1_Pooling/config.json": {"word_embedding_dimension": 16}
        | (pooling or {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}),
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def test_a_folder_of_sentence_transformers_says_how_texts_become_embeddings(tmp_path: Path) -> None:
    """Its pooling, normalisation, prompts and length were ignored, and then overwritten where the model was saved."""
    folder = sentence_folder(tmp_path / "start")
    data = [{name: text.upper() for name, text in row.items()} for row in ROWS]
    lowered = [{name: text.lower() for name, text in row.items()} for row in ROWS]
    examples = EmbeddingExamples(lowered, words(), max_length=6)
    batch = EmbeddingCollator(words().pad_token_id, 3)([examples[number] for number in range(6)])
    model = AutoModel.from_pretrained(folder, dtype="float64").train()
    rows = [F.normalize(embeddings(model, batch, "cls")[place::3], dim=1) for place in range(3)]
    expected = F.relu((rows[0] - rows[1]).norm(dim=1) - (rows[0] - rows[2]).norm(dim=1) + 5.0).mean()
    options = {"loss_type": "triplet", "max_steps": 1, "learning_rate": 0.0}
    loss = EmbeddingLoss("triplet", "cls", normalizes=True)
    for source in (str(folder), Pipeline(AutoModel.from_pretrained(folder), 2, 3, loss=loss)):
        if isinstance(source, Pipeline):
            options |= {"num_stages": None, "num_micro_batches": None, "schedule": None, "recompute": None}
            options |= {"partition": None}
        made, logs = trained(tmp_path / "out", source, data, **options)
        assert logs[0]["loss"] == pytest.approx(expected.item(), rel=1e-5)
        made.save_model(str(tmp_path / "saved"))
        saved = SentenceFiles.of(tmp_path / "saved")
        assert (saved.pooling, saved.normalizes, saved.max_length, saved.lowers_case) == ("cls", True, 6, True)
        prompts = "config_sentence_transformers.json"
        assert json.loads((tmp_path / "saved" / prompts).read_text()) == json.loads((folder / prompts).read_text())
    of_recipe = {"data": {"kind": "embeddings", "path": "x"}, "model": {"path": str(folder)}}
    recipe = parse_recipe(json.dumps({**of_recipe, "training": {"output_dir": "x", "max_steps": 1}}))
    assert loss_of(recipe) == EmbeddingLoss("multiple_negatives", "cls", normalizes=True)


@pytest.mark.parametrize(
    ("pooling", "modules", "message"),
    [
        (None, "Pooling Dense", "modules.json of .* has Dense; a model of sentence-transformers is supported that is"),
        ({"pooling_mode": "max"}, "Pooling", "the Pooling of .* is max; one of mean, cls, lasttoken is supported"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "Pooling", "is cls, mean; one of mean"),
    ],
)
def test_modules_of_sentence_transformers_that_are_not_supported(
    pooling: dict[str, Any] | None, modules: str, message: str, tmp_path: Path
) -> None:
    """They were left out, and the model trained without them."""
    with pytest.raises(UserError, match=message):
        trained(tmp_path / "out", str(sentence_folder(tmp_path / "start", pooling, modules)), ROWS)


def test_a_folder_trains_as_in_sentence_transformers(tmp_path: Path) -> None:
    """Its own trainer, loss and folder; the saved folder gives the same embeddings there."""
    library = pytest.importorskip("sentence_transformers")
    from datasets import Dataset
    from sentence_transformers import losses
    from torch.utils.data import BatchSampler, SequentialSampler

    folder, recorder = sentence_folder(tmp_path / "start"), Recorder()
    model = library.SentenceTransformer(str(folder), device="cpu")
    common: dict[str, Any] = {"max_steps": 5, "learning_rate": 0.05, "lr_scheduler_type": "constant", "optim": "sgd"}
    common |= {"max_grad_norm": 0, "logging_steps": 1, "save_strategy": "no"}
    options: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    theirs = library.SentenceTransformerTrainer(
        model=model,
        args=library.SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path / "theirs"), per_device_train_batch_size=6, **common | options
        ),
        train_dataset=Dataset.from_list(ROWS),
        loss=losses.TripletLoss(model, triplet_margin=5.0),
        callbacks=[recorder],
    )
    theirs.get_batch_sampler = lambda dataset, batch_size, drop_last, **others: BatchSampler(
        SequentialSampler(dataset), batch_size, drop_last
    )
    theirs.train()
    made, logs = trained(tmp_path / "ours", str(folder), ROWS, **common, loss_type="triplet")
    assert [one["loss"] for one in logs if "loss" in one] == pytest.approx(recorder.losses, abs=1e-5, rel=0)
    made.save_model(str(tmp_path / "saved"))
    saved = library.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert saved.default_prompt_name == "query"
    texts = [row["anchor"] for row in ROWS]
    found, expected = (one.encode(texts, convert_to_tensor=True) for one in (saved, model))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_sentence_transformers_loads_the_directory(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    config = tiny_config("llama")
    config.vocab_size = len(words())
    made, _ = trained(tmp_path / "out", LlamaModel(config), ROWS, pooling="lasttoken", texts=3, max_steps=1)
    made.save_model(str(tmp_path / "saved"))
    loaded = library.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    found = loaded.encode([row["anchor"] for row in ROWS[:3]], convert_to_tensor=True)
    examples = EmbeddingExamples(ROWS[:3], words())
    batch = EmbeddingCollator(words().pad_token_id, 3)([examples[number] for number in range(3)])
    torch.testing.assert_close(found.double(), made.pipe.embed(batch)[::3], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("loss_type", "texts"),
    [("multiple_negatives", 2), ("multiple_negatives", 3), ("triplet", 3), ("cosine", 2), ("cosent", 2)],
)
def test_thirty_steps_of_sentence_transformers(loss_type: str, texts: int, tmp_path: Path) -> None:
    """Its own trainer and losses, in float64: what differs in float32 is rounding, which AdamW scales up.

    So it does where a gradient is 0 but for rounding, such as that of the last bias, which no difference of embeddings
    depends on. Losses are noted in float32.
    """
    library = pytest.importorskip("sentence_transformers")
    from datasets import Dataset
    from sentence_transformers import losses
    from sentence_transformers.models import Pooling, Transformer
    from torch.utils.data import BatchSampler, SequentialSampler

    names = ["anchor", "positive", "negative"][:texts]
    data: list[dict[str, Any]] = [{name: row[name] for name in names} for row in ROWS]
    if loss_type in ("cosine", "cosent"):
        data = [
            {"sentence1": row["anchor"], "sentence2": row["positive"], "score": i / 20} for i, row in enumerate(ROWS)
        ]
    torch.manual_seed(0)
    start = BertModel(BertConfig(**SMALL | {"vocab_size": len(words())}, **NO_DROPOUT, intermediate_size=32)).double()
    start.save_pretrained(tmp_path / "start")
    words().save_pretrained(tmp_path / "start")
    common: dict[str, Any] = {"max_steps": 30, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    common |= {"optim": "adamw_torch", "max_grad_norm": 1.0, "logging_steps": 1, "save_strategy": "no"}
    transformer = Transformer(str(tmp_path / "start"), model_kwargs={"dtype": torch.float64})
    model = library.SentenceTransformer(modules=[transformer, Pooling(16, "mean")], device="cpu")
    made = {
        "multiple_negatives": losses.MultipleNegativesRankingLoss,
        "triplet": losses.TripletLoss,
        "cosine": losses.CosineSimilarityLoss,
        "cosent": losses.CoSENTLoss,
    }[loss_type]
    recorder = Recorder()
    options: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    theirs = library.SentenceTransformerTrainer(
        model=model,
        args=library.SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path / "theirs"), per_device_train_batch_size=6, **common | options
        ),
        train_dataset=Dataset.from_list(data),
        loss=made(model),
        callbacks=[recorder],
    )
    theirs.get_batch_sampler = lambda dataset, batch_size, drop_last, **others: BatchSampler(
        SequentialSampler(dataset), batch_size, drop_last
    )
    theirs.train()
    ours, logs = trained(tmp_path / "ours", start, data, **common, loss_type=loss_type, texts=texts)
    assert [one["loss"] for one in logs if "loss" in one] == pytest.approx(recorder.losses, abs=1e-6, rel=0)
    assert len(recorder.losses) == 30
    found = {name.rpartition("model.")[2]: parameter for name, parameter in transformer.named_parameters()}
    for name, parameter in weights(ours).items():
        torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-9, msg=name)


def test_a_language_model_loses_its_head(tmp_path: Path) -> None:
    """From a directory, also with adapters; a pooler that nothing trains may be missing; a norm may not."""
    config = tiny_config("llama")
    config.vocab_size = len(words())
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="FEATURE_EXTRACTION", target_modules=["q_proj"])
    data = [{"sentence1": row["anchor"], "sentence2": row["negative"], "score": 0.5} for row in ROWS]
    options: dict[str, Any] = {"loss_type": "cosine", "pooling": "lasttoken", "max_steps": 1}
    args = PipelineEmbeddingConfig(
        output_dir=str(tmp_path / "out"), num_stages=2, partition="count", recompute="none", use_cpu=True, **options
    )
    made = PipelineEmbeddingTrainer(
        str(tmp_path / "llama"), args, train_dataset=data, processing_class=words(), peft_config=lora
    )
    made.train()
    made.save_model(str(tmp_path / "adapters"))
    assert (tmp_path / "adapters/adapter_config.json").exists()
    assert (tmp_path / "adapters/modules.json").exists()
    bert = BertConfig(**SMALL, intermediate_size=32)
    BertForMaskedLM(bert).save_pretrained(tmp_path / "bert")
    pipe = Pipeline(str(tmp_path / "bert"), 2, config_overrides={"architectures": ["BertModel"]}, loss=EmbeddingLoss())
    assert "pooler.dense.weight" in dict(pipe.named_parameters())
    assert "1 pass of forwards" in report(pipe.plan(rows(4)))


@pytest.mark.parametrize("family", ["distilbert", "modernbert"])
def test_encoders_without_a_language_model_are_exact(family: str) -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    config = CONFIG_MAPPING[family]()
    assert compare(config, (3,), MODEL_MAPPING[type(config)]).is_exact


def test_the_held_out_report_counts_ties_against_the_model() -> None:
    """A text that two anchors share is right for both; of a collapsed model nothing is right, nor a correlation."""
    data = [*ROWS, {**ROWS[-1], "anchor": "who is waiting"}]
    model = BertModel(BertConfig(**SMALL | {"vocab_size": len(words())}, intermediate_size=32)).double()
    collapsed = copy.deepcopy(model)
    with torch.no_grad():
        collapsed.encoder.layer[-1].output.LayerNorm.weight.zero_()
        collapsed.encoder.layer[-1].output.LayerNorm.bias.copy_(torch.rand(16))
    pairs = [{name: row[name] for name in ("anchor", "positive")} for row in data]
    examples = EmbeddingExamples([row | {"score": number % 3} for number, row in enumerate(pairs)], words())
    with torch.no_grad():
        whole = embeddings(model.eval(), EmbeddingCollator(0, 2)(list(examples)), "mean")
    own = {name: whole[place::2] for place, name in enumerate(("anchor", "positive"))}
    ranks = []
    for number, row in enumerate(pairs):
        near = F.cosine_similarity(own["anchor"][number], own["positive"], dim=1)
        others = [float(near[i]) for i, other in enumerate(pairs) if other["positive"] != row["positive"]]
        ranks.append(1 + sum(value >= float(near[number]) for value in others))

    def reported(given: Any, loss_type: str = "multiple_negatives", rows: Any = examples) -> Any:
        pipe = Pipeline(copy.deepcopy(given), 2, 2, loss=EmbeddingLoss(loss_type))
        return evaluate_embeddings(pipe, HeldOut(lambda: rows, 5))

    values = reported(model).values
    assert values["accuracy"] == ranks.count(1) / len(data) < 1
    assert values["mean_reciprocal_rank"] == pytest.approx(sum(1 / rank for rank in ranks) / len(data), rel=1e-12)
    values = reported(collapsed).values
    assert values["accuracy"] == 0
    assert values["mean_reciprocal_rank"] == pytest.approx((17 / 19 + 2 / 18) / 19, rel=1e-12)
    assert -1 <= reported(model, "cosine").values["spearman"] <= 1
    alike = EmbeddingExamples([row | {"score": 1} for row in pairs], words())
    for report_of_one in (reported(collapsed, "cosine"), reported(model, "cosine", alike)):
        assert _finite(report_of_one.to_dict())["spearman"] is None
        assert "not known: all cosines or all scores are equal" in report_of_one.text("test")


def test_rows() -> None:
    read = embedded_of("row 1", {"negative": "c", "positive": "b", "anchor": "a", "label": 1})
    assert read == {"texts": ["a", "b", "c"], "score": 1}
    assert embedded_of("row 1", {"query": "a", "answer": "b"})["texts"] == ["a", "b"]
    for row, message in (
        ({"a": "x", "b": 3}, "row 1: 'b' is a int; it must be text"),
        ({"a": "x"}, "row 1 has 1 texts"),
        ({"a": "x", "b": "y", "c": "z"}, "row 1 has 3 texts (.*), and 2 are needed"),
        ({"a": "x", "b": "y", "score": "high"}, "row 1: the score is 'high'; it must be a number"),
    ):
        with pytest.raises(DataError, match=message):
            embedded_of("row 1", row, texts=2 if len(row) > 1 else None)
    with pytest.raises(DataError, match="an example has no score, which the loss needs"):
        EmbeddingCollator(0, 2, needs_score=True)(list(EmbeddingExamples([{"a": "x", "b": "y"}], words())))


def test_what_cannot_be_honoured(tmp_path: Path) -> None:
    for options, message in (
        ({"loss_type": "cosin"}, "loss_type: found 'cosin' .*expected .*did you mean 'cosine'"),
        ({"pooling": "max"}, "pooling: found 'max'"),
        ({"loss_type": "triplet", "texts": 2}, "texts=2: an example of loss_type='triplet' has 3 texts"),
        ({"scale": 0.0}, "scale: found 0.0 .*expected a number above 0"),
        ({"scale": math.inf}, "scale: found inf .*expected a number above 0"),
        ({"matryoshka_dims": [4], "matryoshka_weights": [1.0, 2.0]}, "expected one for each of matryoshka_dims"),
        (
            {"matryoshka_dims": [4], "matryoshka_weights": [math.nan]},
            r"matryoshka_weights\[0\]: found nan .*expected a number above 0",
        ),
    ):
        with pytest.raises(UserError, match=message):
            PipelineEmbeddingConfig(output_dir=str(tmp_path), **options).check()  # type: ignore[arg-type]
    with pytest.raises(UserError, match="compares the rows of a mini-batch in two passes, between which no stage may"):
        Pipeline(plain("bert"), 2, 2, "pipedream", loss=EmbeddingLoss())
    message = "pooling='cls' takes the first token.*a decoder-only model.*set pooling to 'mean' or 'lasttoken'"
    bloom = BloomModel(BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2))
    decoder = BertModel(BertConfig(**SMALL, intermediate_size=32, is_decoder=True))
    for model in (plain("llama"), plain("gpt2"), bloom, decoder):
        with pytest.raises(UserError, match=message):
            Pipeline(model, 2, 2, loss=EmbeddingLoss(pooling="cls"))
    recipe = """
model: {config: {model_type: llama, vocab_size: 64, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2}}
data: {kind: embeddings, path: a.jsonl}
training: {output_dir: out}
"""
    with pytest.raises(UserError, match=message):
        check_model(parse_recipe(recipe, ["embeddings.pooling=cls"]))
    check_model(parse_recipe(recipe, ["embeddings.pooling=mean"]))
    with pytest.raises(UserError, match="BertModel has no head, and the loss, a TokenLoss, reads more than hidden"):
        Pipeline(plain("bert"), 2, 2)
    with pytest.raises(UserError, match="embed: the loss is a TokenLoss, which reads no embeddings; give"):
        Pipeline(plain_model(tiny_config("llama")), 1).embed({"input_ids": torch.ones(1, 1, dtype=torch.long)})
    with pytest.raises(UserError, match="BertModel has no head for tokens, and cannot generate"):
        Pipeline(plain("bert"), 1, loss=EmbeddingLoss()).generate(input_ids=torch.ones(1, 1, dtype=torch.long))


# ---------------------------------------------------------------------- prompts, duplicates, evaluators


def test_prompts_stand_before_the_texts_of_their_columns(tmp_path: Path) -> None:
    row = {"query": "a", "answer": "b"}
    assert embedded_of("row 1", row, prompts={"query": "q: "})["texts"] == ["q: a", "b"]
    assert embedded_of("row 1", row, prompts="t: ")["texts"] == ["t: a", "t: b"]
    with pytest.raises(DataError, match="row 1 has the columns query, answer, and prompts has 'anchor'"):
        embedded_of("row 1", row, prompts={"anchor": "q: "})
    data = [{name: one[name] for name in ("anchor", "positive")} for one in ROWS]
    said = [{"anchor": f"ab {one['anchor']}", "positive": f"b {one['positive']}"} for one in data]
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SMALL | {"vocab_size": len(words())}, **NO_DROPOUT, intermediate_size=32)).double()
    _, expected = trained(tmp_path, copy.deepcopy(model), said, max_steps=2)
    _, found = trained(tmp_path, copy.deepcopy(model), data, max_steps=2, prompts={"anchor": "ab ", "positive": "b "})
    _, without = trained(tmp_path, model, data, max_steps=2)
    losses = [[one["loss"] for one in logs if "loss" in one] for logs in (expected, found, without)]
    assert losses[0] == losses[1] != losses[2]
    folder = sentence_folder(tmp_path / "folder", {"pooling_mode_mean_tokens": True, "include_prompt": False})
    with pytest.raises(UnsupportedModelError, match="prompts: the model's Pooling leaves the tokens of prompts out"):
        trained(tmp_path, str(folder), data, prompts="a ")


def test_no_mini_batch_has_a_text_twice(tmp_path: Path) -> None:
    """Drawn at random, some would have: each text is in two rows, and each positive is another row's anchor."""
    texts = [f"{a} {b}" for a in "abcdef" for b in "ghijkl"]
    data = [{"anchor": text, "positive": texts[number - 1]} for number, text in enumerate(texts)]
    seen: list[torch.Tensor] = []

    class Spy(EmbeddingCollator):
        def __call__(self, rows: Any) -> Any:
            seen.append(batch := super().__call__(rows))
            return batch

    torch.manual_seed(0)
    model = BertModel(BertConfig(**SMALL | {"vocab_size": len(words())}, **NO_DROPOUT, intermediate_size=32))
    options: dict[str, Any] = {"max_steps": 12, "logging_steps": 1, "num_stages": 2, "use_cpu": True}
    for sampler in ("batch_sampler", "no_duplicates"):
        seen.clear()
        args = PipelineEmbeddingConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=6,
            batch_sampler=sampler,
            save_strategy="no",
            **options,
        )
        PipelineEmbeddingTrainer(
            copy.deepcopy(model), args, data_collator=Spy(0), train_dataset=data, processing_class=words()
        ).train()
        batches = [[tuple(row) for row in batch["input_ids"].tolist()] for batch in seen[-12:]]
        has_duplicates = any(len({*batch}) < len(batch) for batch in batches)
        assert has_duplicates == (sampler == "batch_sampler")
    with pytest.raises(UserError, match="batch_sampler is 'no_duplicates' and train_sampling_strategy 'sequential'"):
        PipelineEmbeddingConfig(
            output_dir=str(tmp_path), batch_sampler="no_duplicates", train_sampling_strategy="sequential"
        )
    with pytest.raises(UserError, match=r"length_bucketing is true and embeddings\.batch_sampler is no_duplicates"):
        parse_recipe(
            "model: {path: somewhere}\ndata: {kind: embeddings, path: a.jsonl}\ntraining: {output_dir: out}",
            ["embeddings.batch_sampler=no_duplicates"],
        )


class Evaluator:
    """Notes how the model encodes, as evaluators of sentence-transformers call it."""

    def __init__(self) -> None:
        self.places: list[tuple[Any, ...]] = []

    def __call__(self, model: Any, output_path: str | None = None, epoch: float = -1, steps: int = -1) -> Any:
        self.places.append((output_path, steps))
        texts = ["a", "c d", "e f g"]
        found = model.encode(texts, batch_size=2, normalize_embeddings=True, truncate_dim=4)
        alone = [model.encode(text, convert_to_tensor=True)[:4] for text in texts]
        expected = F.normalize(torch.stack(alone), dim=1)
        return {"difference": float((torch.from_numpy(found) - expected).abs().max()), "steps": steps}


def _evaluate(folder: str) -> Any:
    evaluator, data = Evaluator(), [{name: one[name] for name in ("anchor", "positive")} for one in ROWS]
    torch.manual_seed(0)
    made = PipelineEmbeddingTrainer(
        BertModel(BertConfig(**SMALL | {"vocab_size": len(words())}, **NO_DROPOUT, intermediate_size=32)),
        PipelineEmbeddingConfig(
            output_dir=folder,
            num_stages=2,
            num_micro_batches=2,
            per_device_train_batch_size=6,
            max_steps=2,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="no",
            use_cpu=True,
        ),
        train_dataset=data,
        processing_class=words(),
        evaluator=evaluator,
    )
    made.train()
    made.eval_dataset = made.train_dataset
    metrics = made.evaluate()
    return evaluator.places, metrics, [line for line in made.state.log_history if "eval_steps" in line]


def test_evaluators_see_a_model_that_encodes(tmp_path: Path) -> None:
    """With and without rows to evaluate on; every process calls them, and the main process alone may write."""
    first, second = run_gloo(_evaluate, 2, str(tmp_path))
    assert first[0] == [(str(tmp_path / "eval"), step) for step in (1, 2, 2)]
    assert second[0] == [(None, step) for step in (1, 2, 2)]
    assert first[1] == second[1]
    assert first[1]["eval_difference"] < 1e-6
    assert 0 < first[1]["eval_loss"] < 10
    assert [line["eval_steps"] for line in first[2]] == [1, 2, 2]


def test_evaluators_of_sentence_transformers(tmp_path: Path) -> None:
    """Their metrics are those of the saved model in SentenceTransformer itself."""
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers import evaluation

    texts = [row["anchor"] for row in ROWS], [row["positive"] for row in ROWS]
    corpus = {f"{number}": text for number, text in enumerate(texts[1])}
    queries = {f"q{number}": text for number, text in enumerate(texts[0])}
    evaluators = [
        evaluation.EmbeddingSimilarityEvaluator(*texts, scores=[number / 20 for number in range(len(ROWS))]),
        evaluation.TripletEvaluator(*texts, [row["negative"] for row in ROWS]),
        evaluation.InformationRetrievalEvaluator(queries, corpus, {f"q{n}": {f"{n}"} for n in range(len(ROWS))}),
    ]
    # Means of whole texts: no two are nearly equal, so that rounding decides nothing.
    folder = sentence_folder(tmp_path / "start", {"pooling_mode_mean_tokens": True})
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
    args = PipelineEmbeddingConfig(output_dir=str(tmp_path / "out"), num_stages=2, use_cpu=True, max_steps=1)
    made = PipelineEmbeddingTrainer(str(folder), args, train_dataset=ROWS, evaluator=evaluators)
    metrics = made.evaluate()
    made.save_model(str(tmp_path / "saved"))
    loaded = library.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    for evaluator in evaluators:
        for name, value in evaluator(loaded).items():
            assert metrics[f"eval_{name}"] == pytest.approx(value, abs=1e-5), name
