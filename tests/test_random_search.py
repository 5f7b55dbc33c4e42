"""Stages and the plain model have the same numbers, wherever a new seed leads; see scripts/random_search.py."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
import transformers

from hf_gpipe.adapters import stubs
from hf_gpipe.adapters.observation.tiny import tiny_config
from hf_gpipe.model.reference import Step
from hf_gpipe.schedule.validate import check_table
from scripts.families import default_config
from scripts.random_cases.draw import Case, draw, families, random_table
from scripts.random_cases.fields import changes
from scripts.random_cases.run import REFUSED, RIGHT, WRONG, difference, run
from scripts.random_search import counts, line_of, main, quiet, search
from tests.versions import needs_mended_doge

#: Cases that are drawn, however fast the machine is.
NUM_CASES = 6


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """The search silences warnings and logs, and runs in one thread; other tests read them."""
    threads, logger = torch.get_num_threads(), logging.getLogger("hf_gpipe")
    level, verbosity = logger.level, transformers.logging.get_verbosity()
    with warnings.catch_warnings():
        quiet()
        yield
    logger.setLevel(level)
    transformers.logging.set_verbosity(verbosity)
    torch.set_num_threads(threads)


def test_no_random_case_is_wrong() -> None:
    """A new seed each time. What fails is printed with the command that runs it again, reduced to what it needs."""
    seed = random.SystemRandom().randrange(10**6)
    outcomes = list(islice(search(seed, 30.0), NUM_CASES))
    told = counts([line_of(one) for one in outcomes])
    print(f"seed {seed}\n{told}")
    wrong = [
        f"python scripts/random_search.py --seed {seed} --case {one.case.number}\n    {one.case}: {one.detail}"
        for one in outcomes
        if one.verdict == WRONG
    ]
    assert not wrong, "\n".join(wrong)
    assert sum(one.verdict == RIGHT for one in outcomes) >= 1, told


#: Each was wrong, or failed in words that named nothing.
MENDED = {
    "doge: its experts' logits are mixed over tokens, and so over columns of padding that stages cut off": Case(
        1, 5, "doge", {"is_moe": True}, num_stages=3, num_micro_batches=2
    ),
    "a first token that padding on its left predicts: what that attends to depends on the columns that were cut": Case(
        1, 8, "gpt_bigcode", padding="both", rows=(2,)
    ),
    "a window of 0 hides everything, and then attention is over every column": Case(
        1, 1, "t5gemma2", {"encoder.text_config.sliding_window": 0}, rows=(1,)
    ),
    "an expert's capacity is used up by padding, which stages cut off": Case(
        1, 1, "nllb-moe", {"expert_capacity": 1}, num_stages=5, num_micro_batches=3, schedule="interleaved_1f1b"
    ),
    "a linear layer whose output the model changes in place, under a split backward": Case(
        1, 1, "roc_bert", num_stages=3, num_micro_batches=3, schedule="zb_h1"
    ),
    "a LoRA of a router, whose weight is computed from others, got no gradient under a split backward": Case(
        1, 1, "afmoe", schedule="zb_h2", rows=(2,), lora=True
    ),
    "LoRA on T5, whose first block is on another stage than its table of positions is used": Case(
        1, 1, "mt5", num_stages=4, lora=True
    ),
    "LoRA on BERT, whose embeddings are on another stage: PEFT asks each stage for them": Case(
        1, 1, "bert", num_stages=3, lora=True
    ),
    "attention that sees later tokens where sdpa gets no mask, as without columns of padding": Case(
        1, 1, "paligemma", attention="sdpa", rows=(1,)
    ),
    "positions that begin with 1, which packed documents began with 0": Case(
        1, 1, "paligemma", num_stages=1, rows=(1,), packing=True
    ),
    "rotary frequencies that later and longer rows have changed, when a forward runs again": Case(
        1,
        1,
        "llama",
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 4},
        rows=(1, 6, 1),
        recompute="stage",
    ),
    "rotary frequencies of a chunk that follow from its own length": Case(
        1,
        74,
        "phi3",
        {
            "original_max_position_embeddings": 12,
            "rope_parameters": {
                **{"rope_theta": 1e4, "rope_type": "longrope", "original_max_position_embeddings": 12, "factor": 4.0},
                **{"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 3.0, 5.0, 7.0]},
            },
        },
        rows=(2,),
        sequence_chunks=3,
    ),
    "a linear layer without inputs, under a split backward": Case(
        1, 1, "gemma3_text", {"intermediate_size": 0}, schedule="zb_h2"
    ),
    "compiled blocks that run again, to which the search gave contexts that torch does not compile": Case(
        1, 1, "bitnet", num_stages=1, recompute="block", rows=(1,), modes=("compiled",)
    ),
    "a teacher that was to be made from the configuration of the text part": Case(
        1, 1, "emu3", num_stages=1, rows=(1,), modes=("teacher",)
    ),
}


@pytest.mark.parametrize("case", MENDED.values(), ids=MENDED.keys())
def test_what_the_search_has_found_is_mended(case: Case) -> None:
    if case.family == "doge":
        needs_mended_doge()
    outcome = run(case)
    assert (outcome.verdict, outcome.case) == (RIGHT, case), outcome.detail


#: Each was wrong, or failed in words that named nothing.
NAMED = {
    "the plain model counts padding on the left as positions, and predicts the first token from it": (
        Case(1, 3, "falcon", padding="left", packing=True, rows=(3,)),
        "is padded on the left",
    ),
    "the same of a source": (Case(1, 3, "bart", padding="left", packing=True, rows=(1,)), "is padded on the left"),
    "a state that documents hand on, hardly seen under a norm with a large epsilon": (
        Case(1, 1, "qwen3_next", {"rms_norm_eps": 0.1}, rows=(5,), padding="none", packing=True),
        "documents in one row change each other's logits",
    ),
    "prompts of MVP, which every block reads": (Case(1, 1, "mvp", {"use_prompt": True}), "use_prompt is set"),
    "TrOCR's own loss does not shift labels, and ours was that of the next token": (
        Case(1, 1, "trocr"),
        "its own loss does not shift the labels",
    ),
    "a first token that padding on its left predicts, from later chunks too": (
        Case(1, 3, "llama", padding="left", rows=(3,), sequence_chunks=2),
        "padding predicts its first token",
    ),
    "the same of a family whose sdpa does not give zeros": (
        Case(1, 3, "doge", padding="left", rows=(3,), sequence_chunks=3, attention="sdpa"),
        "padding predicts its first token",
    ),
    "a model without blocks": (
        Case(1, 1, "cohere2_moe", {"num_hidden_layers": 0}),
        "expected 1 list(s) of blocks that run in order",
    ),
}


@pytest.mark.parametrize(("case", "message"), NAMED.values(), ids=NAMED.keys())
def test_what_cannot_be_the_same_is_named(case: Case, message: str) -> None:
    if case.family == "doge":
        needs_mended_doge()
    outcome = run(case)
    assert outcome.verdict == REFUSED, outcome.detail
    assert message in outcome.detail


def test_a_wrong_gradient_is_found_and_reduced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stage that loses a little of what it sends must be seen, whatever else is drawn."""

    def loses_a_little(self: stubs.PassThrough, *args: object, **kwargs: object) -> object:
        hidden = args[0] * 1.000001  # type: ignore[operator]
        if self.port is not None:
            self.port.captured = hidden
        return hidden if self.num_outputs is None else (hidden, *[None] * (self.num_outputs - 1))

    monkeypatch.setattr(stubs.PassThrough, "__call__", loses_a_little)
    monkeypatch.setattr("hf_gpipe.pipeline.probe.verify", lambda *args, **options: None)
    seed, names = 3, ("llama",)
    cases = (draw(seed, number, names)[0] for number in range(100))
    number = next(case.number for case in cases if case.num_stages > 2 and not case.modes)
    assert main(["--seed", str(seed), "--case", str(number), "--families", *names]) == 1
    assert "reduced: llama" in capsys.readouterr().out


def test_every_type_of_rotary_embeddings_is_drawn() -> None:
    config = tiny_config(default_config("gemma3_text"))
    drawn = [changes(config, random.Random(seed), 3).get("rope_parameters", {}) for seed in range(300)]
    types = {part["rope_type"] for rope in drawn for part in rope.values()}
    assert types >= {"default", "linear", "dynamic", "yarn", "llama3", "longrope"}


def test_equal_seeds_draw_equal_cases() -> None:
    for number in range(20):
        assert draw(5, number, families())[0] == draw(5, number, families())[0]


def test_random_tables_are_valid() -> None:
    rng = random.Random(random.SystemRandom().randrange(10**6))
    for _ in range(20):
        check_table(random_table(rng.randint(1, 4), rng.randint(1, 4), rng, recomputes=rng.random() < 0.5))


def test_a_gradient_of_rounding_is_none() -> None:
    """That of the bias of attention's keys is 0 in exact arithmetic, and here it may be all that is trained."""

    def step(gradient: float, loss: float = 1.0) -> Step:
        return Step(loss, {"k_proj.bias": torch.full((3,), gradient, dtype=torch.float64)}, torch.float64)

    assert difference(step(1e-20), step(-2e-20)) == 0
    assert difference(step(1e-20, 1.5), step(2e-20)) == 0.5
    assert difference(step(1e-9), step(2e-9)) == pytest.approx(0.5)
