"""Training on preferences: the losses, metrics and weights of TRL's DPOTrainer, and of a plain loop."""

from __future__ import annotations

import copy
import importlib
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from hf_gpipe import Pipeline, PipelineDPOConfig, PipelineDPOTrainer
from hf_gpipe.adapters.peft import without_adapters
from hf_gpipe.data import PreferenceCollator, PreferenceExamples
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.losses.loss import LossInputs
from hf_gpipe.tasks.dpo import METRICS, PreferenceLoss
from hf_gpipe.training import base
from tests.data.chat_templates import tokenizer
from tests.gloo import run_gloo
from tests.oracle import plain_model, tiny_config
from tests.training.toy import Recorder, trained_alike, weights


def rows(count: int = 24, seed: int = 0) -> list[dict[str, str]]:
    rng = random.Random(seed)

    def text() -> str:
        return "".join(rng.choices("abcdef ", k=rng.randint(2, 9)))

    return [{"prompt": f"{text()}:", "chosen": text(), "rejected": text()} for _ in range(count)]


def config() -> LlamaConfig:
    made: Any = tiny_config("llama", tied=False)
    made.vocab_size = 320
    return made


def arguments(folder: Path | str, **values: Any) -> PipelineDPOConfig:
    common: dict[str, Any] = {
        "num_stages": 2,
        "num_micro_batches": 2,
        "schedule": "gpipe",
        "recompute": "stage",
        "partition": "count",
        "max_steps": 4,
        "per_device_train_batch_size": 3,
        "learning_rate": 0.05,
        # Adam would make much of rounding where a gradient is next to nothing.
        "optim": "sgd",
        "max_grad_norm": 0,
        "beta": 0.5,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
    }
    return PipelineDPOConfig(output_dir=str(folder), **common | values)


def made_trainer(
    folder: Path | str, model: Any, dataset: Any = None, options: dict[str, Any] | None = None, **values: Any
) -> tuple[PipelineDPOTrainer, Recorder]:
    recorder = Recorder()
    made = PipelineDPOTrainer(
        model,
        args=arguments(folder, **values),
        train_dataset=rows() if dataset is None else dataset,
        processing_class=tokenizer(),
        callbacks=[recorder],
        **options or {},
    )
    return made, recorder


def trained(*given: Any, **values: Any) -> tuple[PipelineDPOTrainer, list[dict[str, Any]]]:
    """A trainer at the end of its training, and what it has logged."""
    made, recorder = made_trainer(*given, **values)
    made.train()
    return made, recorder.logs


def log_probs_of(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the rows of a mini-batch."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    labels = batch["labels"][:, 1:]
    return -F.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none").sum(1)


def plain_losses(
    model: PreTrainedModel, reference: PreTrainedModel | None, loss_type: str, rate: float = 0.05
) -> list[float]:
    """DPO in a few lines: four steps of SGD on three pairs each. Without a reference the adapters are turned off."""
    examples = PreferenceExamples(rows(), tokenizer())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(4):
        batch = PreferenceCollator(0)([examples[index] for index in range(3 * step, 3 * step + 3)])
        with torch.no_grad(), without_adapters(model) if reference is None else nullcontext():
            ref = log_probs_of(reference or model, batch)
        ratios = (log_probs_of(model, batch) - ref).view(-1, 2)
        if loss_type == "ipo":
            ratios = ratios / (batch["labels"] != -100).sum(1).view(-1, 2)
            loss = ((ratios[:, 0] - ratios[:, 1] - 1 / (2 * 0.5)) ** 2).mean()
        else:
            margin = 0.5 * (ratios[:, 0] - ratios[:, 1])
            loss = (-0.9 * F.logsigmoid(margin) - 0.1 * F.logsigmoid(-margin)).mean()
        loss.backward()
        optimizer.param_groups[0]["lr"] = rate * (1 - step / 4)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("num_stages", "loss_type", "others"),
    [
        (1, "ipo", {"recompute": "none"}),
        (2, "sigmoid", {"schedule": "1f1b", "precompute_ref_batch_size": 5}),
        (
            3,
            "ipo",
            {
                "recompute": "block",
                "partition": "auto",
                "num_micro_batches": 4,
                "train_sampling_strategy": "sequential",
            },
        ),
    ],
)
def test_all_weights_against_a_plain_loop(num_stages: int, loss_type: str, others: Any, tmp_path: Path) -> None:
    model = plain_model(config())
    start = copy.deepcopy(model)
    has_other = num_stages == 1
    reference = plain_model(config(), seed=3) if has_other else copy.deepcopy(model)
    expected = plain_losses(model, reference, loss_type)
    smoothing = 0.1 if loss_type == "sigmoid" else 0.0
    made, logs = trained(
        tmp_path,
        start,
        num_stages=num_stages,
        loss_type=[loss_type],
        label_smoothing=smoothing,
        options={
            "eval_dataset": {"some": rows(5, seed=1), "more": rows(2, seed=2)},
            "ref_model": reference if has_other else None,
        },
        **others,
    )
    assert [one["loss"] for one in logs if "loss" in one] == pytest.approx(expected, abs=1e-7)
    parameters = weights(made)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameters[name], parameter, rtol=0, atol=1e-7, msg=name)
    metrics = made.evaluate()
    assert {f"eval_{one}_{name}" for one in ("some", "more") for name in METRICS} <= metrics.keys()
    assert metrics["eval_some_rewards/margins"] == pytest.approx(
        metrics["eval_some_rewards/chosen"] - metrics["eval_some_rewards/rejected"]
    )
    assert metrics["eval_more_logps/chosen"] == pytest.approx(
        float(made.pipe.log_probs(PreferenceCollator(0)(list(made.eval_dataset["more"])))[::2].mean())
    )
    with pytest.raises(UserError, match="the reference is not in memory any more"):
        made.evaluate(rows(4, seed=2))


def _train_with_lora(folder: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    from peft import LoraConfig

    lora = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.2)
    made = PipelineDPOTrainer(
        plain_model(config()),
        args=arguments(folder, label_smoothing=0.1, learning_rate=0.5),
        train_dataset=rows(),
        processing_class=tokenizer(),
        callbacks=[recorder := Recorder()],
        peft_config=lora,
    )
    start = {name: p.detach().clone() for name, p in made.pipe.named_parameters()}
    every = {n: t for part in made.world.gather_objects(start) for n, t in part.items()}
    made.train()
    assert made.evaluate(rows(4, seed=2))["eval_rewards/accuracies"] <= 1
    return [one["loss"] for one in recorder.logs if "loss" in one], every, weights(made)


def test_adapters_alone_in_two_processes_against_a_plain_loop(tmp_path: Path) -> None:
    """The reference is the model with its adapters turned off, in each step."""
    peft = pytest.importorskip("peft")
    (losses, start, end), (others, _, _) = run_gloo(_train_with_lora, 2, str(tmp_path))
    lora = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(plain_model(config()), lora).get_base_model()
    model.load_state_dict(start)
    expected = plain_losses(model, None, "sigmoid", rate=0.5)
    assert losses == others == pytest.approx(expected, abs=1e-6)
    moved = 0.0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(end[name], parameter, rtol=0, atol=1e-6, msg=name)
        moved = max(moved, float((end[name] - start[name]).abs().max()))
    assert moved > 1e-3


#: Of TRL's trainers: their own name of the loss, and its arguments.
BESIDE_TRL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sigmoid": ("DPO", "sigmoid", {}),
    "ipo": ("DPO", "ipo", {"precompute_ref_log_probs": True}),
    "cpo": ("CPO", "sigmoid", {"cpo_alpha": 0.3, "label_smoothing": 0.1}),
    "simpo": ("CPO", "simpo", {"cpo_alpha": 0.5, "simpo_gamma": 0.7}),
    "orpo": ("ORPO", "", {}),
}
OF_DPO: dict[str, dict[str, Any]] = {
    "several": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.5]},
    "aot": {"loss_type": "aot"},
    "aot_unpaired": {"loss_type": ["aot_unpaired", "sft"], "label_smoothing": 0.1},
    "exo_pair": {"loss_type": "exo_pair", "label_smoothing": 0.01, "f_divergence_type": "js_divergence"},
    "discopop": {"loss_type": "discopop", "discopop_tau": 0.1, "f_divergence_type": "forward_kl"},
    "ld": {"ld_alpha": 0.4, "precompute_ref_log_probs": True},
    "wpo": {"loss_type": ["sigmoid_norm", "nca_pair"], "use_weighting": True},
    "alpha": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3, "ld_alpha": 0.0},
}
BESIDE_TRL |= {name: ("DPO", "", own) for name, own in OF_DPO.items()}


@pytest.mark.parametrize(
    ("loss_type", "has_lora"), [("sigmoid", False), *((loss_type, True) for loss_type in BESIDE_TRL)]
)
def test_thirty_steps_of_trl(loss_type: str, has_lora: bool, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    kind, name, own = BESIDE_TRL[loss_type]
    where = trl if kind == "DPO" else importlib.import_module(f"trl.experimental.{kind.lower()}")
    common: dict[str, Any] = own | {
        "max_steps": 30,
        "learning_rate": 2e-3,
        "optim": "adamw_torch",
        "max_grad_norm": 1.0,
        "beta": 0.3,
        "max_length": 20,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "per_device_eval_batch_size": 4,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    training, held_out = rows(40), rows(4, seed=1)
    for row in training + held_out if kind != "DPO" else []:
        # TRL puts the first token before prompts that lack it, and ORPO's cross-entropy is also of prompts' tokens.
        row["prompt"] = "<s>" + row["prompt"] * (kind == "CPO")
    model, recorder = plain_model(config(), dtype=torch.float32), Recorder()
    options: dict[str, Any] = {}
    words = tokenizer()
    words.pad_token = words.eos_token
    if has_lora:
        peft = pytest.importorskip("peft")
        options["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    made, ours = made_trainer(
        tmp_path,
        copy.deepcopy(model),
        training,
        options | {"eval_dataset": held_out},
        **({} if loss_type in OF_DPO else {"loss_type": loss_type}),
        **common,
    )
    if name:
        common["loss_type"] = [name] if kind == "DPO" else name
    args = getattr(where, f"{kind}Config")(
        output_dir=str(tmp_path / "trl"), use_cpu=True, disable_tqdm=True, report_to="none", **common
    )
    if kind == "DPO" and not has_lora:
        options["ref_model"] = copy.deepcopy(model)
    theirs = getattr(where, f"{kind}Trainer")(
        model,
        args=args,
        train_dataset=Dataset.from_list(training),
        eval_dataset=Dataset.from_list(held_out),
        processing_class=words,
        callbacks=[recorder],
        **options,
    )
    # From whole logits, the first log-ratios are 0 but for rounding, and so are the signs that accuracies count.
    names = [name for name in METRICS if loss_type != "wpo" or name != "rewards/accuracies"]
    trained_alike(made, theirs, (ours, recorder), names)


def test_metrics_since_the_last_log_are_in_the_log_of_the_end(tmp_path: Path) -> None:
    """The metrics of the last steps were dropped, unless a log fell on the last step; TRL adds them to the end's."""
    model = plain_model(config())
    _, every = trained(tmp_path, copy.deepcopy(model), max_steps=5)
    for steps, first in ((3, 3), (5, None)):
        _, logs = trained(tmp_path, copy.deepcopy(model), max_steps=5, logging_steps=steps)
        assert "train_loss" in logs[-1]
        for name in METRICS:
            if first is None:
                assert name not in logs[-1]
            else:
                expected = [log[name] for log in every if "loss" in log][first:]
                assert logs[-1][name] == pytest.approx(sum(expected) / len(expected), abs=1e-10)


def test_the_formulas_of_every_loss() -> None:
    """By numbers that were worked out by hand: beta = 0.5, log-ratios 1 and -1 of 2 and 4 tokens."""
    losses = torch.tensor([[3.0], [8.0]], dtype=torch.float64)
    labels = torch.tensor([[-100, 1, 2, -100, -100], [-100, 1, 2, 3, 4]])
    inputs = {"labels": labels, "ref_logps": torch.tensor([-4.0, -7.0])}
    log_s, log_s_minus = -0.31326168751822286, -1.3132616875182228  # log s(1), log s(-1)
    for loss_type, smoothing, expected in (
        ("sigmoid", 0.0, -log_s),
        ("sigmoid", 0.2, -0.8 * log_s - 0.2 * log_s_minus),
        ("robust", 0.2, (-0.8 * log_s + 0.2 * log_s_minus) / 0.6),
        ("hinge", 0.0, 0.0),
        ("ipo", 0.0, (0.5 + 0.25 - 1) ** 2),
        ("sigmoid_norm", 0.0, -float(F.logsigmoid(torch.tensor(0.375)))),
        ("nca_pair", 0.0, 0.4740769841801067 + (0.9740769841801067 + 0.4740769841801067) / 2),
        ("bco_pair", 0.0, 2 * 0.4740769841801067),
        ("sppo_hard", 0.0, 0.0),
        ("apo_zero", 0.0, 1 - 0.6224593312018546 + 0.3775406687981454),
        ("apo_down", 0.0, 0.6224593312018546 + 1 - 0.7310585786300049),
    ):
        loss = PreferenceLoss(0.5, loss_type, smoothing)
        assert float(loss.unit_losses(LossInputs(inputs, 1, token_losses=losses))) == pytest.approx(
            expected, rel=1e-6
        ), loss_type
        values, counts = loss.take(is_training=True).tolist()
        assert values == pytest.approx([0.5, -0.5, 1, 1, -3, -8])
        assert counts == [1] * 6
        assert not loss.take(is_training=True).any()
    free = PreferenceLoss(0.5, reference_free=True)
    assert float(free.unit_losses(LossInputs({"labels": labels}, 1, token_losses=losses))) == pytest.approx(
        -float(F.logsigmoid(torch.tensor(2.5)))
    )


def without_reference(loss_type: str, log_probs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The papers' formulas, for beta = 0.5: of pairs (N, 2), with TRL's mean of the cross-entropy over tokens."""
    nll = -log_probs[:, 0].sum() / lengths[:, 0].sum()
    per_token = log_probs / lengths
    if loss_type == "cpo":
        return 0.3 * nll - F.logsigmoid(0.5 * (log_probs[:, 0] - log_probs[:, 1])).mean()
    if loss_type == "simpo":
        margin = 0.5 * (per_token[:, 0] - per_token[:, 1]) - 0.7
        return (-0.9 * F.logsigmoid(margin) - 0.1 * F.logsigmoid(-margin)).mean()
    odds = per_token.exp() / (1 - per_token.exp())
    return nll - 0.5 * torch.log(torch.sigmoid(torch.log(odds[:, 0] / odds[:, 1]))).mean()


WITHOUT_REFERENCE: dict[str, dict[str, Any]] = {
    "cpo": {"cpo_alpha": 0.3},
    "simpo": {"simpo_gamma": 0.7, "label_smoothing": 0.1},
    "orpo": {},
}


@pytest.mark.parametrize("loss_type", WITHOUT_REFERENCE)
def test_loss_and_every_gradient_without_a_reference(loss_type: str) -> None:
    examples = PreferenceExamples(rows(5), tokenizer())
    batch = PreferenceCollator(0)(list(examples))
    plain = plain_model(config())
    lengths = (batch["labels"] != -100).sum(1).view(-1, 2)
    expected = without_reference(loss_type, log_probs_of(plain, batch).view(-1, 2), lengths)
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    norm = float(torch.stack([one.norm() for one in gradients.values() if one is not None]).norm())
    loss = PreferenceLoss(0.5, loss_type, **WITHOUT_REFERENCE[loss_type])
    for num_stages, count, schedule, recompute, buckets in (
        (1, 1, "gpipe", "none", False),
        (2, 2, "1f1b", "stage", False),
        (3, 3, "gpipe", "block", True),
        (3, 4, "zb_h1", "none", True),
    ):
        pipe = Pipeline(
            copy.deepcopy(plain), num_stages, count, schedule, recompute, loss=loss, length_bucketing=buckets
        )
        pipe.zero_grad()
        assert float(pipe.train_step(batch)) == pytest.approx(float(expected), abs=1e-10)
        for name, parameter in pipe.named_parameters():
            assert float((parameter.grad - gradients[name]).norm()) <= 1e-10 * norm, name  # type: ignore[operator]


@pytest.mark.parametrize("loss_type", ["cpo", "orpo"])
def test_training_without_a_reference(loss_type: str, tmp_path: Path) -> None:
    """No pass of a reference is made, and the logged loss and metrics are those of the formulas."""
    model = plain_model(config())
    batch = PreferenceCollator(0)(list(PreferenceExamples(rows(3), tokenizer())))
    log_probs, lengths = log_probs_of(model, batch).view(-1, 2).detach(), (batch["labels"] != -100).sum(1).view(-1, 2)
    options = WITHOUT_REFERENCE[loss_type]
    made, logs = trained(tmp_path, copy.deepcopy(model), loss_type=loss_type, num_stages=3, max_steps=1, **options)
    assert logs[0]["loss"] == pytest.approx(float(without_reference(loss_type, log_probs, lengths)), abs=1e-7)
    noted = log_probs / lengths if loss_type == "orpo" else log_probs
    assert logs[0]["logps/chosen"] == pytest.approx(float(noted[:, 0].mean()))
    assert logs[0]["rewards/margins"] == pytest.approx(0.5 * float((noted[:, 0] - noted[:, 1]).mean()))
    assert "ref_chosen_logps" not in made.train_dataset[0]


def test_what_is_refused(tmp_path: Path) -> None:
    for values, message in (
        ({"beta": 0.0}, "beta: found 0.0 .*expected a number above 0"),
        ({"loss_type": "sigmod"}, "loss_type: found 'sigmod' .*expected 'sigmoid'.*did you mean 'sigmoid'"),
        ({"loss_type": ["sigmoid", "cpo"]}, "loss_type is sigmoid, cpo, and cpo is a loss of its own; name it alone"),
        ({"loss_type": ["sigmoid", "sftt"]}, r"loss_type: found \['sigmoid', 'sftt'\] .*'orpo' or a list of these"),
        ({"loss_type": ["sft", "ipo"], "loss_weights": [1.0]}, "loss_weights has 1 entries, and loss_type 2"),
        ({"loss_type": "exo_pair"}, "label_smoothing is 0, and exo_pair reads its logarithm"),
        (
            {"loss_type": ["ipo", "nca_pair"], "f_divergence_type": "forward_kl"},
            "f_divergence_type is 'forward_kl' .*loss_type is nca_pair, which does not use it; choose sigmoid or",
        ),
        ({"loss_type": ["aot", "ipo"], "use_weighting": True}, "use_weighting is true .*loss_type is aot, which does"),
        ({"loss_type": ["sft", "ipo"], "use_weighting": True}, "use_weighting is true .*loss_type is sft, which does"),
        ({"f_alpha_divergence_coef": 2.0}, "f_divergence_type is reverse_kl, which has none"),
        (
            {"loss_type": "ipo", "label_smoothing": 0.1},
            "label_smoothing is 0.1 .*loss_type is ipo, which does",
        ),
        (
            {"loss_type": "orpo", "label_smoothing": 0.1},
            "label_smoothing is 0.1 .*loss_type is orpo, which does",
        ),
        ({"simpo_gamma": 0.0}, "simpo_gamma is 0.0 .*loss_type is sigmoid, which does not use it; choose simpo"),
        ({"cpo_alpha": 0.5}, "cpo_alpha is 0.5 .*loss_type is sigmoid, which does not use it; choose cpo or simpo"),
        ({"loss_type": "simpo", "simpo_gamma": -1.0}, "simpo_gamma: found -1.0 .*expected a number of at least 0"),
        (
            {"loss_type": "cpo", "precompute_ref_log_probs": True},
            "precompute_ref_log_probs is true .*loss_type is cpo, so no",
        ),
        ({"packing": True}, "packing=True: mini-batches are made of whole examples"),
        ({"label_smoothing_factor": 0.1}, "the loss is not the cross-entropy"),
        ({"logit_clipping": 5.0}, r"logit_clipping=5\.0: .* the loss is not the cross-entropy"),
    ):
        with pytest.raises(UserError, match=message):
            arguments(tmp_path, **values)
    args = arguments(tmp_path, loss_type="orpo", precompute_ref_batch_size=3)
    with pytest.raises(UserError, match="precompute_ref_batch_size=3 would have no effect"):
        PipelineDPOTrainer(config(), args=args, train_dataset=rows(), processing_class=tokenizer())
    args = arguments(tmp_path, loss_type="orpo")
    with pytest.raises(UserError, match="ref_model is given, and loss_type='orpo' reads no reference"):
        PipelineDPOTrainer(config(), config(), args, train_dataset=rows(), processing_class=tokenizer())
    args = arguments(tmp_path, num_micro_batches=1)
    with pytest.raises(UserError, match="marian is an encoder-decoder; give a decoder-only model"):
        PipelineDPOTrainer(tiny_config("marian"), args=args, train_dataset=rows(), processing_class=tokenizer())
    with pytest.raises(UserError, match="processing_class is None; give the tokenizer"):
        PipelineDPOTrainer(config(), args=args, train_dataset=rows())
    with pytest.raises(UserError, match=r"has the loss TokenLoss\(.*the arguments ask for PreferenceLoss\("):
        PipelineDPOTrainer(Pipeline(config(), 2, 1), args=args, train_dataset=rows(), processing_class=tokenizer())
    with pytest.raises(DataError, match="an iterator, which can be read once"):
        PipelineDPOTrainer(config(), args=args, train_dataset=iter(rows()), processing_class=tokenizer())


def test_a_model_in_memory_brings_the_tokenizer_of_its_directory(tmp_path: Path) -> None:
    """A model that was loaded in the script needed its tokenizer as processing_class, which TRL finds itself."""
    plain_model(config(), dtype=torch.float32).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    one = PipelineDPOTrainer(model, args=arguments(tmp_path / "out"), train_dataset=rows())
    given = PipelineDPOTrainer(
        str(tmp_path / "model"), args=arguments(tmp_path / "out"), train_dataset=rows(), processing_class=tokenizer()
    )
    assert one.processing_class.get_vocab() == tokenizer().get_vocab()
    assert one.train_dataset[0] == given.train_dataset[0]
    for file in (tmp_path / "model").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match="processing_class is None; give the tokenizer"):
        PipelineDPOTrainer(model, args=arguments(tmp_path / "out"), train_dataset=rows())


def test_what_is_left_to_the_planner_may_be_kept_from_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer compares its arguments with the Pipeline that it has made, which has the earlier run's M."""
    monkeypatch.setattr(base, "_num_micro_batches_before", lambda _: 3)
    for asked in ("auto", None):
        args = arguments(tmp_path, num_micro_batches=asked)
        made = PipelineDPOTrainer(config(), args=args, train_dataset=rows(), processing_class=tokenizer())
        assert made.pipe.num_micro_batches == 3
