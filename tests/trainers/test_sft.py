"""Supervised fine-tuning: the tokens, losses, metrics and arguments of TRL's SFTTrainer, and of a plain loop."""

from __future__ import annotations

import copy
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    TrainingArguments,
)

from hf_gpipe import DistillationLoss, Pipeline, PipelineDPOConfig, PipelineSFTConfig, PipelineSFTTrainer
from hf_gpipe.adapters import adapter_for
from hf_gpipe.adapters.modules.dropout import key, mix
from hf_gpipe.data import SFTExamples
from hf_gpipe.data.chat_examples import SFTCollator
from hf_gpipe.data.packed_rows import packed_rows
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.losses.loss import TokenLoss
from hf_gpipe.runtime.cutting import Cutting, make_micro_batches
from tests.data.chat_templates import MARKED, tokenizer
from tests.gloo import run_gloo
from tests.oracle import plain_model
from tests.training.toy import Recorder, trainer, weights

METRICS = ("loss", "entropy", "mean_token_accuracy", "num_tokens")


def text(rng: random.Random) -> str:
    return "".join(rng.choices("abcdef ", k=rng.randint(2, 12)))


def rows(kind: str = "completion", count: int = 18, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)

    def turn(role: str) -> dict[str, str]:
        return {"role": role, "content": text(rng)}

    def messages() -> list[dict[str, str]]:
        return [turn("user"), turn("assistant")] * rng.randint(1, 2)

    if kind == "text":
        return [{"text": text(rng)} for _ in range(count)]
    if kind == "messages":
        return [{"messages": messages()} for _ in range(count)]
    if kind == "chat completion":
        return [{"prompt": [turn("user")], "completion": [turn("assistant")]} for _ in range(count)]
    if kind == "ids":
        return [{"input_ids": rng.sample(range(5, 300), rng.randint(2, 9))} for _ in range(count)]
    return [{"prompt": f"{text(rng)}:", "completion": text(rng)} for _ in range(count)]


def chat_tokenizer() -> Any:
    made = tokenizer()
    made.chat_template = MARKED["llama 3"]
    return made


def config(family: str = "llama") -> PreTrainedConfig:
    common: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    if family == "gemma2":
        return Gemma2Config(**common, head_dim=8, query_pre_attn_scalar=8)
    return {"llama": LlamaConfig, "qwen2": Qwen2Config}[family](**common)


def arguments(folder: Path | str, **values: Any) -> PipelineSFTConfig:
    common: dict[str, Any] = {
        "num_stages": 2,
        "num_micro_batches": 2,
        "schedule": "gpipe",
        "recompute": "stage",
        "partition": "count",
        "max_steps": 4,
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 2,
        "learning_rate": 0.05,
        # Adam would make much of rounding where a gradient is next to nothing.
        "optim": "sgd",
        "max_grad_norm": 0,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "bf16": False,
        "use_cpu": True,
    }
    return PipelineSFTConfig(output_dir=str(folder), **common | values)


def trained(
    folder: Path | str, model: Any, dataset: Any = None, options: dict[str, Any] | None = None, **values: Any
) -> tuple[PipelineSFTTrainer, list[dict[str, Any]]]:
    """A trainer at the end of its training, and the lines of its losses."""
    recorder = Recorder()
    made = PipelineSFTTrainer(
        model,
        args=arguments(folder, **values),
        train_dataset=rows() if dataset is None else dataset,
        processing_class=chat_tokenizer(),
        callbacks=[recorder],
        **options or {},
    )
    made.train()
    return made, [one for one in recorder.logs if "loss" in one]


def steps_of(examples: Any, size: int = 3) -> list[list[dict[str, list[int]]]]:
    """The documents of four mini-batches, one epoch after the other."""
    starts = list(range(0, len(examples), size))
    batches = [range(start, min(start + size, len(examples))) for start in starts]
    return [[one for index in batches[step % len(batches)] for one in _documents(examples[index])] for step in range(4)]


def _documents(row: dict[str, list[int]]) -> list[dict[str, list[int]]]:
    ends = torch.tensor([0, *row.get("seq_lengths", [len(row["input_ids"])])]).cumsum(0).tolist()
    return [{name: row[name][start:stop] for name in ("input_ids", "labels")} for start, stop in pairwise(ends)]


def plain_logs(
    model: PreTrainedModel, steps: list[list[dict[str, list[int]]]], loss_type: str = "nll"
) -> list[dict[str, float]]:
    """SGD on documents one by one, with TRL's metrics in their plainest form."""
    optimizer, logs, seen = torch.optim.SGD(model.parameters()), [], 0
    for step, documents in enumerate(steps):
        sums = torch.zeros(3, dtype=torch.float64)
        total = sum(label != -100 for one in documents for label in one["labels"][1:])
        for one in documents:
            labels = torch.tensor(one["labels"][1:], dtype=torch.long)
            logits = model(input_ids=torch.tensor([one["input_ids"]]), use_cache=False).logits[0, :-1]
            logits, labels = logits[labels != -100], labels[labels != -100]
            nll = F.cross_entropy(logits, labels, reduction="none")
            loss = nll * nll.neg().exp().detach() if loss_type == "dft" else nll
            (loss.sum() / total).backward()
            log_probs = logits.detach().log_softmax(-1)
            entropy = -(log_probs.exp() * log_probs).sum()
            sums += torch.stack([loss.detach().sum(), entropy, (logits.argmax(-1) == labels).double().sum()])
            seen += len(one["input_ids"])
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 4)
        optimizer.step()
        optimizer.zero_grad()
        logs.append(dict(zip(METRICS, (*(sums / total).tolist(), seen), strict=True)))
    return logs


def assert_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        for name in METRICS:
            assert float(mine[name]) == pytest.approx(float(theirs[name]), abs=tolerance), name


# ---------------------------------------------------------------------- numbers


PACKED = {"packing": True, "max_length": 25}


@pytest.mark.parametrize(
    ("family", "kind", "num_stages", "others"),
    [
        ("llama", "completion", 1, {"recompute": "none"}),
        ("qwen2", "messages", 3, {"recompute": "block", "schedule": "1f1b", "assistant_only_loss": True}),
        ("gemma2", "text", 2, {"partition": "auto", "loss_type": "dft"}),
        ("llama", "completion", 2, {"num_micro_batches": 3, **PACKED}),
        ("llama", "text", 2, {"packing_strategy": "bfd_split", **PACKED, "max_length": 7}),
        ("gemma2", "ids", 2, {"padding_free": True, "max_length": None}),
    ],
)
def test_losses_metrics_and_weights_against_a_plain_loop(
    family: str, kind: str, num_stages: int, others: Any, tmp_path: Path
) -> None:
    model = plain_model(config(family))
    start = copy.deepcopy(model)
    examples = SFTExamples(
        rows(kind),
        chat_tokenizer(),
        max_length=others.get("max_length", 1024),
        assistant_only_loss="assistant_only_loss" in others,
        completion_only_loss=kind == "completion",
        packing=others.get("packing_strategy", "bfd") if others.get("packing") else None,
    )
    expected = plain_logs(model, steps_of(examples), others.get("loss_type", "nll"))
    made, logs = trained(tmp_path, start, rows(kind), num_stages=num_stages, **others)
    assert_alike(logs, expected, 1e-7)
    parameters = weights(made)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameters[name], parameter, rtol=0, atol=1e-9, msg=name)


def _in_processes(folder: str, num_stages: int, replicas: Any) -> tuple[list[dict[str, Any]], dict[str, float]]:
    made, logs = trained(
        folder, plain_model(config()), num_stages=num_stages, replicas=replicas, gradient_accumulation_steps=2
    )
    return logs, made.evaluate(rows(count=5, seed=1))


def test_metrics_of_replicas_and_accumulated_mini_batches_are_those_of_one_process(tmp_path: Path) -> None:
    """Each mini-batch's metrics are summed over the replicas that have run its micro-batches, and then averaged."""
    expected, evaluated = _in_processes(str(tmp_path / "one"), 2, 1)
    for logs, metrics in run_gloo(_in_processes, 3, str(tmp_path / "three"), 2, [1, 2]):
        assert_alike(logs, expected, 1e-9)
        for name in METRICS:
            assert metrics[f"eval_{name}"] == pytest.approx(evaluated[f"eval_{name}"], abs=1e-9)


def test_metrics_of_an_evaluation_are_means_over_mini_batches(tmp_path: Path) -> None:
    made, _ = trained(tmp_path, plain_model(config()), options={"eval_dataset": {"some": rows(count=5, seed=1)}})
    found = made.evaluate()
    whole = made.pipe.model.eval()
    examples = made.eval_dataset["some"]
    expected = []
    for batch in (range(0, 2), range(2, 4), range(4, 5)):
        sums = torch.zeros(2, dtype=torch.float64)
        for one in (examples[index] for index in batch):
            labels = torch.tensor(one["labels"][1:])
            with torch.no_grad():
                logits = whole(input_ids=torch.tensor([one["input_ids"]]), use_cache=False).logits[0, :-1]
            sums += torch.tensor([float((logits.argmax(-1) == labels).sum()), float((labels != -100).sum())])
        expected.append(float(sums[0] / sums[1]))
    assert found["eval_some_mean_token_accuracy"] == pytest.approx(sum(expected) / 3)
    assert found["eval_some_num_tokens"] == made.num_trained_tokens


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_losses_and_metrics_are_trl_s(family: str, num_stages: int, tmp_path: Path) -> None:
    """The same rows and arguments, in float32 with AdamW, for 20 steps."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    kind = {1: "completion", 2: "messages", 3: "text"}[num_stages]
    model = plain_model(config(family), dtype=torch.float32)
    common: dict[str, Any] = {
        "max_steps": 20,
        "optim": "adamw_torch",
        "learning_rate": 5e-3,
        "max_grad_norm": 1.0,
        "gradient_accumulation_steps": 2,
        "max_length": 200,
    }
    _, logs = trained(tmp_path / "mine", copy.deepcopy(model), rows(kind), num_stages=num_stages, **common)
    own = {"num_stages", "num_micro_batches"}
    asked = arguments(tmp_path / "theirs", **common)
    names = {*common, "per_device_train_batch_size", "logging_steps", "train_sampling_strategy", "save_strategy"} - own
    recorder = Recorder()
    trl.SFTTrainer(
        model,
        args=trl.SFTConfig(
            output_dir=str(tmp_path / "theirs"),
            bf16=False,
            use_cpu=True,
            report_to="none",
            gradient_checkpointing=False,
            **{name: getattr(asked, name) for name in names},
        ),
        train_dataset=datasets.Dataset.from_list(rows(kind)),
        processing_class=chat_tokenizer(),
        callbacks=[recorder],
    ).train()
    assert_alike(logs, [one for one in recorder.logs if "loss" in one], 1e-5)


def test_the_dynamic_loss_has_the_gradient_of_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 11, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.tensor([3, 1, -100, 0, 10, 5, -100])
    TokenLoss(is_dynamic=True)(logits, targets).sum().backward()
    found, logits.grad = logits.grad, None
    nll = F.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
    (nll * nll.neg().exp().detach())[targets != -100].sum().backward()
    torch.testing.assert_close(found, logits.grad)


# ---------------------------------------------------------------------- NEFTune


def test_noise_on_embeddings_is_the_plain_model_s_and_the_same_for_every_split(tmp_path: Path) -> None:
    """The noise is drawn from the seed, the step and the number of the row, and its size follows from the width of the
    mini-batch, as in transformers. So neither the number M nor chunks of rows matter."""
    model = plain_model(config())
    examples = SFTExamples(rows("ids"), tokenizer())
    widths = [max(len(one["input_ids"]) for one in documents) for documents in steps_of(examples)]
    embeddings, numbers = model.get_input_embeddings(), iter(range(12))

    def add_noise(module: Any, args: Any, embedded: torch.Tensor) -> torch.Tensor:
        step, row = divmod(next(numbers), 3)
        torch.manual_seed(mix(0, step, key("row"), row))
        bound = 5 / (widths[step] * embedded.shape[2]) ** 0.5
        return embedded + torch.empty_like(embedded).uniform_(-bound, bound)

    plain = copy.deepcopy(model)
    handle = embeddings.register_forward_hook(add_noise)
    expected = plain_logs(model, steps_of(examples))
    handle.remove()
    without = trained(tmp_path, copy.deepcopy(plain), rows("ids"), seed=0)[1]
    assert abs(without[0]["loss"] - expected[0]["loss"]) > 1e-3
    for num_stages, recompute, count, chunks in ((1, "none", 3, 1), (2, "stage", 2, 3), (3, "block", 1, 1)):
        made, logs = trained(
            tmp_path,
            copy.deepcopy(plain),
            rows("ids"),
            num_stages=num_stages,
            recompute=recompute,
            num_micro_batches=count,
            sequence_chunks=chunks,
            seed=0,
            neftune_noise_alpha=5,
        )
        assert_alike(logs, expected, 1e-9)
    one, other = (made.evaluate(rows("ids", 4))["eval_loss"] for _ in range(2))
    assert one == other


@pytest.mark.parametrize("length_bucketing", [False, True])
def test_each_row_has_the_same_seed_for_every_number_of_micro_batches(length_bucketing: bool) -> None:
    adapter = adapter_for(config())
    ids = torch.arange(3, 17).view(7, 2)
    batch = {"input_ids": ids, "labels": ids}
    seeds = []
    for count in (1, 3, 7):
        made = make_micro_batches(adapter, [batch, batch], Cutting(count, length_bucketing), 5, 2)
        of_rows: dict[tuple[int, int], int] = {}
        for one in made:
            firsts = one.inputs["input_ids"][:, 0].tolist()
            of_rows |= {(one.mini_batch[1], first): seed for first, seed in zip(firsts, one.rows.seeds, strict=True)}
        seeds.append(of_rows)
    assert len(set(seeds[0].values())) == 14
    assert seeds[0] == seeds[1] == seeds[2]


def test_noise_is_refused_where_the_model_has_an_encoder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neftune_noise_alpha=5.*marian has an encoder"):
        trainer(tmp_path, neftune_noise_alpha=5)


# ---------------------------------------------------------------------- rows


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packed_rows_have_every_token_once(strategy: str) -> None:
    rng = random.Random(0)
    lengths = [rng.choice([0, 1, 2, 3, 5, 8, 13, 40]) for _ in range(1500)]
    filled = packed_rows(range(1500), lengths, 16, strategy)
    tokens = [(row, place) for pieces in filled for row, start, stop in pieces for place in range(start, stop)]
    kept = [min(length, 16) if strategy == "bfd" else length for length in lengths]
    assert sorted(tokens) == [(row, place) for row, length in enumerate(kept) for place in range(length)]
    sizes = [sum(stop - start for _, start, stop in pieces) for pieces in filled]
    assert max(sizes) == 16
    assert len(filled) < 1.1 * sum(kept) / 16 + 2
    pieces = packed_rows(range(4), [5, 2, 3, 1], 4, "bfd_split")
    assert pieces == [[(0, 0, 4)], [(2, 0, 3), (0, 4, 5)], [(1, 0, 2), (3, 0, 1)]]


def test_rows_of_every_form() -> None:
    made = chat_tokenizer()

    def example(row: dict[str, Any], **options: Any) -> tuple[str, str]:
        (found,) = SFTExamples([row], made, **options)
        learnt = [token for token in found["labels"] if token != -100]
        return made.decode(found["input_ids"]), made.decode(learnt)

    assert example({"text": "stages"}) == ("stages</s>", "stages</s>")
    assert example({"story": "stages</s>", "text": "no"}, text_field="story") == ("stages</s>", "stages</s>")
    completion = {"prompt": "a b", "completion": "c"}
    assert example(completion, completion_only_loss=True) == ("a bc</s>", "c</s>")
    assert example(completion) == ("a bc</s>", "a bc</s>")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]
    whole, learnt = example({"messages": chat})
    assert "hi" in whole
    assert whole == learnt
    assert example({"messages": chat}, assistant_only_loss=True) == (whole, "you<|eot_id|>")
    assert example({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "you"}]})[0] == whole
    split = {"prompt": chat[:1], "completion": chat[1:]}
    assert example(split, completion_only_loss=True) == (whole, "you<|eot_id|>")
    assert example({"messages": chat[:1]})[1].count("hi") == 1
    ids = {"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1], "assistant_masks": [1, 0, 0, 1]}
    (found,) = SFTExamples([ids], made, completion_only_loss=True)
    assert found == {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, -100, 8]}
    (found,) = SFTExamples([ids | {"labels": [5, 6, -100, 8]}], made, max_length=3)
    assert found == {"input_ids": [5, 6, 7], "labels": [5, 6, -100]}
    (found,) = SFTExamples([{"input_ids": [5, 6, 7]}], made, max_length=2, truncation_mode="keep_end")
    assert found == {"input_ids": [6, 7], "labels": [6, 7]}
    for row, options, message in (
        ({"story": "a"}, {}, "dataset_text_field"),
        ({"text": "a"}, {"assistant_only_loss": True}, "no messages, which assistant_only_loss needs"),
        ({"input_ids": [1, 2], "labels": [1]}, {}, "2 input_ids and 1 labels"),
        ({"input_ids": [1, 2], "assistant_masks": [1]}, {}, "a mask of another length"),
    ):
        with pytest.raises(DataError, match=message):
            SFTExamples([row], made, **options)


def test_masks_of_rows_that_are_not_prepared_are_not_ignored(tmp_path: Path) -> None:
    """With skip_prepare_dataset every token was learnt; TRL's SFTTrainer raises an error for these rows."""
    skip: dict[str, Any] = {**SKIP, "max_steps": 1}
    ids = {"input_ids": [5, 6, 7, 8]}
    model = plain_model(config())
    for mask in ("assistant_masks", "completion_mask"):
        masked = [ids | {mask: [0, 0, 1, 1]}] * 3
        with pytest.raises(UserError, match=f"the rows have '{mask}' without 'labels'.*Add a 'labels' column"):
            trained(tmp_path, model, masked, **skip)
        labelled = [row | {"labels": [-100, -100, 7, 8]} for row in masked]
        _, (log,) = trained(tmp_path, copy.deepcopy(model), labelled, **skip)
        _, (prepared,) = trained(tmp_path, copy.deepcopy(model), masked, max_steps=1, completion_only_loss=True)
        assert log["loss"] == pytest.approx(prepared["loss"], abs=1e-10)
        made, _ = trained(tmp_path, copy.deepcopy(model), labelled, **skip)
        with pytest.raises(UserError, match=f"the rows have '{mask}'"):
            made.evaluate(masked)


def test_rows_that_lose_their_targets_are_dropped_and_shuffled_as_trl_does() -> None:
    kept = [{"prompt": "a", "completion": "b" * count} for count in range(1, 6)]
    long = {"prompt": "a" * 50, "completion": "b"}
    examples = SFTExamples([long, *kept], tokenizer(), max_length=9, completion_only_loss=True, shuffle_seed=3)
    assert examples.num_dropped == 1
    order = torch.tensor(examples.lengths).tolist()
    plain = SFTExamples(kept, tokenizer(), max_length=9).lengths
    shuffled = pytest.importorskip("datasets").Dataset.from_dict({"length": plain}).shuffle(seed=3)["length"]
    assert order == list(shuffled)


def test_columns_of_examples_are_read_as_those_of_a_dataset(tmp_path: Path) -> None:
    """Scripts of TRL's read `trainer.train_dataset["input_ids"]`, and slices; both ended in a TypeError."""
    for options in ({}, {"packing": True, "max_length": 16}):
        args = arguments(tmp_path, **options)
        one = PipelineSFTTrainer(config(), args=args, train_dataset=rows(), processing_class=tokenizer())
        examples = one.train_dataset
        expected = Dataset.from_list([examples[index] for index in range(len(examples))])
        assert examples.column_names == expected.column_names
        assert examples["input_ids"] == list(expected["input_ids"])
        assert examples[1:3] == expected[1:3]
        assert examples[-1] == expected[-1]
        with pytest.raises(IndexError):
            examples[len(examples)]
        assert not one.aux_loss_enabled


def test_a_formatting_function_makes_texts(tmp_path: Path) -> None:
    questions = [{"question": one["prompt"], "answer": one["completion"]} for one in rows()]
    formatted = {"formatting_func": lambda row: f"Q {row['question']} A {row['answer']}"}
    made, _ = trained(tmp_path, plain_model(config()), questions, formatted, max_steps=1)
    expected = f"Q {questions[0]['question']} A {questions[0]['answer']}</s>"
    assert chat_tokenizer().decode(made.train_dataset[0]["input_ids"]) == expected
    with pytest.raises(UserError, match="formatting_func makes texts"):
        trained(tmp_path, plain_model(config()), None, formatted)


# ---------------------------------------------------------------------- models and arguments


def test_a_saved_model_and_its_tokenizer_are_enough(tmp_path: Path) -> None:
    """A script names a directory: weights in float32, the directory's tokenizer, the tokens noted in what is saved."""
    plain_model(config(), dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    chat_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "chat.jinja").write_text(MARKED["mistral"])
    made = PipelineSFTTrainer(
        str(tmp_path / "model"),
        args=arguments(
            tmp_path / "out",
            max_steps=1,
            eos_token="<|eot_id|>",
            chat_template_path=str(tmp_path / "chat.jinja"),
            model_init_kwargs={"attn_implementation": "eager", "use_cache": False},
        ),
        train_dataset=rows("messages"),
    )
    assert made.pipe.adapter.dtype == torch.float32
    made.train()
    made.save_model(str(tmp_path / "saved"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    end = chat_tokenizer().convert_tokens_to_ids("<|eot_id|>")
    assert (saved.config.eos_token_id, saved.config.use_cache) == (end, False)
    assert saved.generation_config.eos_token_id[0] == end
    assert made.processing_class.chat_template == MARKED["mistral"]


def test_the_auxiliary_loss_of_experts_is_on_unless_its_weight_is_0(tmp_path: Path) -> None:
    """TRL turns it on by the configuration's weight, whatever output_router_logits is."""
    moe: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    moe |= {"shared_expert_intermediate_size": 8, "decoder_sparse_step": 1, "router_aux_loss_coef": 0.5}
    values = {name: value for name, value in config("qwen2").to_dict().items() if name not in ("model_type", "dtype")}
    of_experts = Qwen2MoeConfig(**{**values, **moe, "layer_types": None})
    losses, in_memory, auxiliary = {}, {}, {}
    for weight in (None, 0.0, 0.25):
        asked = {"num_stages": 1, "max_steps": 1, "router_aux_loss_coef": weight}
        _, (log,) = trained(tmp_path, copy.deepcopy(of_experts), **asked)
        losses[weight], auxiliary[weight] = log["loss"], log.get("aux_loss")
        # A model in memory has a copy of the coefficient at its root.
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(of_experts))
        _, (log,) = trained(tmp_path, model, **asked)
        in_memory[weight] = log["loss"]
    for found in (losses, in_memory):
        assert found[None] - found[0.0] == pytest.approx(2 * (found[0.25] - found[0.0]), rel=1e-4)
        assert found[None] - found[0.0] > 0.1
    # It is logged, as TRL does, without its weight.
    assert auxiliary[0.0] is None
    assert auxiliary[0.25] == pytest.approx((losses[0.25] - losses[0.0]) / 0.25, rel=1e-4)
    made, (log,) = trained(tmp_path, copy.deepcopy(of_experts), max_steps=1, learning_rate=0.0, num_micro_batches=1)
    first = made.evaluate(rows()[:3])
    plain = copy.deepcopy(made.model).float().eval()
    batch = SFTCollator(0)(list(SFTExamples(rows()[:3], chat_tokenizer())))
    expected = plain(**batch, output_router_logits=True).aux_loss.item()
    assert first["eval_aux_loss"] == pytest.approx(expected, rel=1e-3)
    with pytest.raises(UserError, match=r"router_aux_loss_coef=0\.1: llama has no auxiliary loss"):
        trained(tmp_path, config(), router_aux_loss_coef=0.1)


SKIP = {"dataset_kwargs": {"skip_prepare_dataset": True}}


def test_defaults_are_trl_s(tmp_path: Path) -> None:
    made = PipelineSFTConfig(output_dir=str(tmp_path), use_cpu=True)
    assert (made.learning_rate, made.logging_steps, made.bf16, made.max_length) == (2e-5, 10, True, 1024)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss_type": "dfp"}, "loss_type='dfp'.*nll, dft"),
        ({"loss_type": "dft", "label_smoothing_factor": 0.1}, "label_smoothing=0.1 has no meaning"),
        ({"packing": True, "packing_strategy": "best"}, "packing_strategy='best'.*bfd, bfd_split, wrapped"),
        ({"packing": True, "max_length": None}, "packing needs max_length"),
        ({"padding_free": True}, "max_length=1024: .* `max_length` is not enforced then; set max_length=None"),
        # Options that were accepted and had no effect.
        ({"packing_strategy": "wrapped"}, "packing_strategy='wrapped' would have no effect: no rows are packed"),
        ({"truncation_mode": "keep_end", "max_length": None}, "truncation_mode='keep_end' would have no effect"),
        ({"truncation_mode": "keep_end", "packing": True}, "truncation_mode='keep_end' would have no effect"),
        ({"shuffle_dataset": True, **SKIP}, "shuffle_dataset=True would have no effect: .*skip_prepare_dataset"),
        ({"assistant_only_loss": True, **SKIP}, "assistant_only_loss=True would have no effect"),
        ({"completion_only_loss": False, **SKIP}, "completion_only_loss=False would have no effect"),
        ({"pad_to_multiple_of": 8}, "pad_to_multiple_of=8"),
        ({"activation_offloading": True}, "recompute='host'"),
        ({"chat_template_path": "org/name"}, "chat_template_path='org/name'"),
        ({"dataset_kwargs": {"add_special_tokens": False}}, "dataset_kwargs: 'add_special_tokens'"),
        ({"dataset_batch_size": 3}, "PipelineSFTConfig has no argument 'dataset_batch_size'"),
        ({"num_train_epochs": None}, "num_train_epochs=None.*max_steps"),
    ],
)
def test_what_cannot_be_honoured_is_named(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        arguments(tmp_path, **values)


def test_arguments_of_trl_that_are_not_there_say_what_to_do(tmp_path: Path) -> None:
    """PipelineDPOConfig(pad_to_multiple_of=8) was Python's TypeError, without a word of what to do."""
    with pytest.raises(UserError, match="PipelineDPOConfig has no argument 'pad_to_multiple_of': each micro-batch is"):
        PipelineDPOConfig(output_dir=str(tmp_path), pad_to_multiple_of=8)
    with pytest.raises(UserError, match=r"no argument 'pakcing'; did you mean 'packing'\?"):
        arguments(tmp_path, pakcing=True)


def test_rows_of_trl_that_no_trainer_tokenises_name_the_trainer_that_does(tmp_path: Path) -> None:
    """PipelineTrainer left only empty rows of them, and the tokenizer's error was that it was given []."""
    for dataset, name in ((rows("messages"), "PipelineSFTTrainer"), (_preferences(), "PipelineDPOTrainer")):
        made = trainer(tmp_path, family="llama", train_dataset=dataset)
        with pytest.raises(DataError, match=f"none that the model takes; they are not tokenised.*{name}"):
            made.train()


def test_a_dataset_with_a_transform(tmp_path: Path) -> None:
    """The preparation read it once, so that a transform that draws its rows gave the same in every epoch."""
    made = Dataset.from_list(rows()).with_transform(lambda batch: batch)
    with pytest.raises(UserError, match=r"Dataset\.with_transform\(\).*skip_prepare_dataset.*trainer-ready"):
        trained(tmp_path, plain_model(config()), made)


def test_arguments_of_a_class_above(tmp_path: Path) -> None:
    """TRL's trainers take TrainingArguments, which were an error; other trainers' arguments still are."""
    given = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, learning_rate=3e-4, logging_steps=3)
    made = PipelineSFTTrainer(plain_model(config()), given, train_dataset=rows(), processing_class=chat_tokenizer())
    assert type(made.args) is PipelineSFTConfig
    assert (made.args.learning_rate, made.args.logging_steps, made.args.max_length) == (3e-4, 3, 1024)
    with pytest.raises(UserError, match="args is a PipelineDPOConfig; this trainer needs a PipelineSFTConfig"):
        PipelineSFTTrainer(plain_model(config()), PipelineDPOConfig(output_dir=str(tmp_path), use_cpu=True))  # type: ignore[arg-type]


def _preferences() -> list[dict[str, str]]:
    return [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 8


def test_what_the_trainer_cannot_honour_is_named(tmp_path: Path) -> None:
    model = plain_model(config())
    with pytest.raises(UserError, match="the rows have images"):
        trained(tmp_path, model, [{"messages": [], "images": []}])
    with pytest.raises(UserError, match="model_init_kwargs are for a model that is read"):
        trained(tmp_path, model, model_init_kwargs={"dtype": "float32"})
    with pytest.raises(UserError, match="another loss than the arguments ask for"):
        trained(tmp_path, Pipeline(config(), 2, 2))
    distils = Pipeline(model, 2, 2, loss=DistillationLoss(), teacher=plain_model(config()))
    with pytest.raises(UserError, match="loss_type is 'dft', and the loss of the given Pipeline, a DistillationLoss"):
        trained(tmp_path, distils, loss_type="dft")
    with pytest.raises(UserError, match="eos_token='<nothing>' is not a token"):
        trained(tmp_path, model, eos_token="<nothing>")


def test_a_given_pipeline_is_trained_with_its_loss(tmp_path: Path) -> None:
    asked = arguments(tmp_path)
    pipe = Pipeline(plain_model(config()), 2, 2, loss=asked.make_loss())
    _, logs = trained(tmp_path, pipe)
    assert_alike(logs, trained(tmp_path, plain_model(config()))[1], 1e-9)
