"""The number of parameters of the models in GPipe's translation experiments."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

import hf_gpipe
from hf_gpipe.errors import RecipeError
from hf_gpipe.from_recipe.transformer_size import transformer_config
from scripts.translation_scaling.sizes import body_parameters, total_parameters
from tests.oracle import tiny_config

PAGE = Path(__file__).parents[2] / "docs" / "translation_models.md"
WIDTH, VOCABULARY = 1024, 64000
PAPER_SIZES = {
    "T(6, 8192, 16)": 400_000_000,
    "T(24, 8192, 16)": 1_300_000_000,
    "T(12, 16384, 32)": 1_300_000_000,
    "T(32, 16384, 32)": 3_000_000_000,
    "T(64, 16384, 32)": 6_000_000_000,
}
"""GPipe's translation models -> their number of parameters as the paper rounds it (arXiv 1811.06965, section 5)."""


def sizes(text: str) -> tuple[int, int, int]:
    layers, width, heads = text.removeprefix("T(").removesuffix(")").split(",")
    return int(layers), int(width), int(heads)


@cache
def counted(text: str) -> tuple[int, int]:
    """Parameters of the body and of the whole model; building the largest takes a while even on the meta device."""
    config = transformer_config(text, d_model=WIDTH, vocab_size=VOCABULARY)
    return body_parameters(config), total_parameters(config)


@pytest.mark.parametrize("text", PAPER_SIZES)
def test_the_paper_s_models(text: str) -> None:
    layers, width, heads = sizes(text)
    # An encoder layer has one attention of four matrices, a decoder layer two, and each two feed-forward matrices.
    body = layers * (12 * WIDTH * 64 * heads + 4 * WIDTH * width)
    table, norms, positions = VOCABULARY * WIDTH, (5 * layers + 2) * WIDTH, 2 * 32 * heads
    assert counted(text) == (body, body + table + norms + positions)
    # transformers' T5 has one table where the paper's models may have two or three, and the paper rounds.
    nearest = min((body + tables * table for tables in (1, 2, 3)), key=lambda n: abs(n - PAPER_SIZES[text]))
    assert nearest == pytest.approx(PAPER_SIZES[text], rel=0.03)


def test_deep_and_wide_are_of_exactly_the_same_size() -> None:
    (deep, all_of_deep), (wide, all_of_wide) = counted("T(24, 8192, 16)"), counted("T(12, 16384, 32)")
    assert deep == wide
    assert abs(all_of_deep - all_of_wide) < 1e-4 * all_of_deep


@pytest.mark.parametrize("family", ["t5", "mt5", "umt5"])
def test_families_agree_on_the_body(family: str) -> None:
    config = transformer_config("T(2, 64, 4)", model_type=family, d_model=32, vocab_size=100, d_kv=8)
    assert body_parameters(config) == 2 * (12 * 32 * 8 * 4 + 4 * 32 * 64)
    assert config.feed_forward_proj == "relu"


def test_the_body_of_other_families() -> None:
    """Neither tables of positions nor a head that is not tied are part of it."""
    body = 2 * (12 * 16 * 16 + 4 * 16 * 32)
    assert [body_parameters(tiny_config("bart", tied=tied)) for tied in (True, False)] == [body, body]
    config = tiny_config("llama", tied=False)
    assert isinstance(config, LlamaConfig)
    assert body_parameters(config) == 3 * (4 * 16 * 16 + 3 * 16 * 32)


def test_the_counts_are_of_the_model_in_memory() -> None:
    config = transformer_config("T(2, 64, 4)", d_model=32, vocab_size=100)
    pipe = hf_gpipe.Pipeline(config, 2, device="cpu")
    assert sum(p.numel() for p in pipe.parameters()) == total_parameters(config)
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": "T(2, 64)"}, r"the size is 'T\(2, 64\)'; it must be T\(L, H, A\)"),
        ({"size": "T(2, 64, 4)", "d_ff": 32}, r"d_ff is 32 and the size is T\(2, 64, 4\), which sets it to 64"),
        ({"size": "T(2, 64, 4)", "model_type": "marian"}, "the family marian cannot have it"),
    ],
)
def test_errors_in_the_terms_of_the_call(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        hf_gpipe.transformer_config(**arguments)


def test_the_page_says_the_same() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for text, paper in PAPER_SIZES.items():
        body, total = counted(text)
        assert f"| {text} | {body / 1e6:,.1f}M | {total / 1e6:,.1f}M | {paper / 1e9:g}B |" in page
