"""Gradients of weights apart from those of inputs (I and W) are those of the backward in one piece (B)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma2Config, GPT2Config, MixtralConfig, PreTrainedConfig, PreTrainedModel, T5Config

from hf_gpipe import Pipeline
from hf_gpipe.schedule import Action, ActionKind, Placement, Schedule, build, check_table
from tests.oracle import VOCABULARY, assert_same, padded_batch, plain_model, run_pipeline, run_plain
from tests.oracle import tiny_config as oracle_config

#: The global gradient norm times this: what another order of summation explains in float64.
TOLERANCE = 1e-14
#: Families that compute in float64 alone.
EXACT = ("llama", "gpt2", "t5", "m2m_100")


def split_table(table: Schedule, delay: int) -> Schedule:
    """The same table with I and W for B. W comes after `delay` more I of its stage, at the latest before G and U."""
    rows = []
    for actions in table.actions:
        row: list[Action] = []
        waiting: dict[int, list[Action]] = {stage: [] for stage in range(table.num_stages)}
        for action in actions:
            own = waiting[action.stage]
            if action.kind == ActionKind.BACKWARD:
                row.append(replace(action, kind=ActionKind.INPUT))
                own.append(replace(action, kind=ActionKind.WEIGHT))
            else:
                if action.micro_batch is None:
                    for own in waiting.values():
                        row += own
                        own.clear()
                row.append(action)
            if len(own) > delay:
                row.append(own.pop(0))
        rows.append(tuple(row))
    found = replace(table, name=f"{table.name}, split", actions=tuple(rows))
    check_table(found)
    return found


def written(folder: Path, num_stages: int, num_micro_batches: int, recompute: Any, delay: int, workers: Any) -> str:
    """The path of a table: 1f1b, its backward in two parts."""
    limits = tuple(None if one in ("none", "block") else one for one in recompute)
    table = build("1f1b", num_stages, num_micro_batches, Placement(workers), limits)
    path = folder / f"{num_stages}-{num_micro_batches}-{delay}.txt"
    path.write_text(split_table(table, delay).text())
    return str(path)


def tiny_config(family: str, *, tied: bool) -> PreTrainedConfig:
    """As `tests.oracle.tiny_config`, for more families."""
    if family in ("llama", "m2m_100"):
        return oracle_config(family, tied=tied)
    sizes = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied, "pad_token_id": 0}
    llama = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    llama |= {"num_key_value_heads": 1, "head_dim": 8}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 2, "decoder_start_token_id": 0}
    if family == "mixtral":
        config = MixtralConfig(num_local_experts=4, output_router_logits=True, **sizes, **llama)
        config._experts_implementation = "eager"  # grouped matrix products do not support float64
        return config
    configs = {
        "gpt2": lambda: GPT2Config(n_embd=16, n_layer=3, n_head=2, n_positions=32, **sizes, **dropouts),
        "t5": lambda: T5Config(dropout_rate=0.0, **sizes, **t5),
        "gemma2": lambda: Gemma2Config(**sizes, **llama),
    }
    return configs[family]()


def deferred_names(model: PreTrainedModel) -> set[str]:
    """Weights of linear layers and of experts and routers, without the head."""
    return {
        name
        for name, p in model.named_parameters()
        if p.dim() > 1 and not any(word in name for word in ("embed", "lm_head", "shared", "wte", "wpe", "bias"))
    }


@pytest.mark.parametrize(
    ("family", "tied", "num_stages", "num_micro_batches", "recompute", "delay"),
    [
        ("llama", True, 2, 3, ("none", "none"), 9),
        ("llama", False, 3, 2, (1, 1, 1), 0),
        ("gpt2", True, 3, 3, ("block", "block", "block"), 1),
        ("gpt2", False, 2, 1, ("none", 1), 1),
        ("t5", False, 2, 3, ("block", "none"), 2),
        ("t5", True, 4, 2, (1, "none", 1, "none"), 0),
        ("m2m_100", True, 3, 3, (2, "none", 1), 1),
        ("gemma2", True, 2, 2, ("none", "block"), 1),
        ("mixtral", False, 3, 3, (2, "none", 1), 2),
        ("mixtral", True, 1, 2, ("block",), 9),
    ],
)
def test_split_gradients_are_the_whole_ones(
    family: str, tied: bool, num_stages: int, num_micro_batches: int, recompute: Any, delay: int, tmp_path: Path
) -> None:
    config = tiny_config(family, tied=tied)
    plain, batch = plain_model(config), padded_batch(config)
    path = written(tmp_path, num_stages, num_micro_batches, recompute, delay, [0] * num_stages)
    whole = Pipeline(plain, num_stages, num_micro_batches, "1f1b", list(recompute))
    expected = run_pipeline(whole, batch)
    # Gemma 2 and Mixtral compute parts in float32, which rounds in another way where columns of padding are cut off.
    assert_same(expected, run_plain(plain, batch, num_micro_batches), 1e-10 if family in EXACT else 1e-7)
    plain.zero_grad()
    mode = "block" if "block" in recompute else "none"
    pipe = Pipeline(plain, num_stages, num_micro_batches, path, **({"recompute": mode} if mode == "block" else {}))
    put: set[str] = set()
    names = {p: name for name, p in pipe.named_parameters()}
    for stage in pipe.stages.values():
        perform = stage.weight_backward

        def noted(index: int, *rest: Any, stage: Any = stage, perform: Any = perform) -> None:
            put.update(names[p] for p in stage.deferred(index))
            perform(index, *rest)

        stage.weight_backward = noted  # type: ignore[method-assign]
    assert_same(run_pipeline(pipe, batch), expected, TOLERANCE)
    assert put == deferred_names(plain)
