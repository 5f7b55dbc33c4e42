"""A teacher's most likely tokens from a file: loss and gradients of a plain loop, TRL's tail, and damaged files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from hf_gpipe import DistillationLoss, Pipeline
from hf_gpipe.data import PairCollator
from hf_gpipe.data.examples.teacher_file import TeacherCollator, TeacherFile, WithTeacher, write_top_k
from hf_gpipe.errors import DataError
from hf_gpipe.losses.cached_teacher import TopK
from hf_gpipe.model.spec import ModelSpec
from scripts.write_teacher import teacher_alone, top_k_of
from tests.oracle import VOCABULARY
from tests.test_distillation import divergence, student, teacher
from tests.training.toy import CausalRows

K, TEMPERATURE = 5, 1.5


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher") / "top.safetensors"
    found = top_k_of(teacher_alone(ModelSpec.of(teacher())), CausalRows(7), K, temperature=TEMPERATURE, batch_size=3)
    write_top_k(path, list(found), vocabulary=VOCABULARY, temperature=TEMPERATURE)
    return path


def with_rest(log_probs: torch.Tensor) -> torch.Tensor:
    """TRL's tail bucket."""
    total = torch.logsumexp(log_probs, -1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([log_probs, torch.log(-torch.expm1(total))], -1)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_loss_and_every_gradient(beta: float, file: Path) -> None:
    loss = DistillationLoss(beta=beta, temperature=TEMPERATURE, cross_entropy_share=0.2, from_rows=True)
    rows = WithTeacher(CausalRows(7), TeacherFile(file, vocabulary=VOCABULARY, temperature=TEMPERATURE))
    batch = TeacherCollator(PairCollator(0))([rows[index] for index in range(7)])
    plain = student(tied=False)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    z = plain(**inputs, use_cache=False).logits[:, :-1]
    zt = teacher().eval()(**inputs, use_cache=False).logits[:, :-1].float()
    p, tokens = torch.log_softmax(zt / TEMPERATURE, -1).topk(K)
    q = torch.log_softmax(z / TEMPERATURE, -1).gather(-1, tokens)
    one = DistillationLoss(beta=beta)  # the classes' logits are their log-probabilities
    labels = batch["labels"][:, 1:]
    compared = divergence(one, with_rest(q), with_rest(p.double().detach()))
    ce = F.cross_entropy(z.transpose(1, 2), labels, reduction="none")
    expected = (0.2 * ce + 0.8 * compared)[labels != -100].sum() / int((labels != -100).sum())
    expected.backward()
    for num_stages, count, schedule in ((1, 1, "gpipe"), (2, 3, "1f1b"), (3, 5, "zb_h1")):
        pipe = Pipeline(student(tied=False), num_stages, count, schedule, loss=loss)
        assert float(pipe.train_step(batch)) == pytest.approx(expected.item(), abs=1e-10)
        for name, parameter in plain.named_parameters():
            found = dict(pipe.named_parameters())[name].grad
            torch.testing.assert_close(found, parameter.grad, rtol=0, atol=1e-10, msg=name)
    assert pipe.eval_step(batch).loss == pytest.approx(expected.item(), abs=1e-10)
    with pytest.raises(DataError, match="the batch has no 'teacher_tokens', which the loss reads"):
        pipe.train_step(PairCollator(0)([CausalRows(7)[0]]))


def test_all_tokens_are_the_whole_teacher() -> None:
    torch.manual_seed(0)
    z, zt, targets = torch.randn(4, 11).double(), torch.randn(4, 11).double(), torch.tensor([1, 2, -100, 3])
    for beta in (0.0, 0.5, 1.0):
        loss = DistillationLoss(beta=beta)
        log_probs, tokens = torch.log_softmax(zt, -1).topk(11)
        for found, whole in zip(
            loss.with_gradient(z, targets, teacher=TopK(tokens, log_probs)),
            loss.with_gradient(z, targets, teacher=zt),
            strict=True,
        ):
            torch.testing.assert_close(found, whole, rtol=0, atol=1e-5)


def test_damaged_files(file: Path, tmp_path: Path) -> None:
    tensors, metadata = load_file(file), {"vocabulary": str(VOCABULARY), "temperature": str(TEMPERATURE)}
    tokens, log_probs = tensors["tokens"], tensors["log_probs"]
    twice, far, large = tokens.clone(), tokens.clone(), log_probs.clone()
    twice[0, 1], far[0, 0], large[0, 0] = twice[0, 0], VOCABULARY, 0.5
    cases: list[tuple[dict[str, torch.Tensor], dict[str, str], str]] = [
        ({}, {"temperature": "1.0"}, "its temperature is '1.0', and the student's loss needs '1.5'"),
        ({}, {"vocabulary": "9"}, "its vocabulary is '9'"),
        ({"more": tokens.clone()}, {}, "it has the tensors input_ids, log_probs, more"),
        ({"tokens": tokens.long()}, {}, "'tokens' has the shape .* or another type"),
        ({"log_probs": log_probs[:-1].clone()}, {}, "which do not fit"),
        ({"offsets": tensors["offsets"].flip(0).contiguous()}, {}, "its offsets do not grow from 0"),
        ({"tokens": twice}, {}, "a token is outside of the vocabulary, or twice"),
        ({"tokens": far}, {}, "a token is outside of the vocabulary, or twice"),
        ({"log_probs": large}, {}, "not finite, or add up to more than 1"),
        ({"log_probs": log_probs * float("nan")}, {}, "not finite, or add up to more than 1"),
    ]
    for changes, other, message in cases:
        save_file(tensors | changes, tmp_path / "bad", metadata | other)
        with pytest.raises(DataError, match=message):
            TeacherFile(tmp_path / "bad", vocabulary=VOCABULARY, temperature=TEMPERATURE)
    (tmp_path / "bad").write_bytes(b"\xff" * 100)
    with pytest.raises(DataError, match="cannot be read"):
        TeacherFile(tmp_path / "bad", vocabulary=VOCABULARY, temperature=TEMPERATURE)
    good = TeacherFile(file, vocabulary=VOCABULARY, temperature=TEMPERATURE)
    with pytest.raises(DataError, match="has no row of these 3 tokens; write it of the same rows"):
        good.of([1, 2, 3])


def test_a_teacher_of_four_bits(tmp_path: Path) -> None:
    """The numbers are those of transformers' own quantised model."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "num_attention_heads": 4, "num_key_value_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, hidden_size=64, intermediate_size=64, num_hidden_layers=2)).save_pretrained(
        tmp_path
    )
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    small = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=bits, device_map={"": "cpu"}).eval()
    batch: dict[str, Any] = PairCollator(0)([CausalRows(5)[index] for index in range(5)])
    inputs, labels = {name: batch[name] for name in ("input_ids", "attention_mask")}, batch["labels"][:, 1:]
    model = student(tied=False).float()
    with torch.no_grad():
        z, zt = (one(**inputs, use_cache=False).logits[:, :-1] for one in (model, small))
        expected = divergence(DistillationLoss(beta=0.5), z, zt.float())[labels != -100].mean()
    spec = ModelSpec.of(str(tmp_path), quantization_config=bits)
    pipe = Pipeline(model, 2, 2, loss=DistillationLoss(beta=0.5), teacher=spec)
    assert float(pipe.train_step(batch)) == pytest.approx(float(expected), rel=1e-3)
    assert pipe.plan(batch).peak_bytes > 0
