"""Hub format in and out, on twelve families: tied and untied, mixtures of experts, encoder-decoders.

What the pipeline saves is what `save_pretrained` of the plain model gives: the same names and bit-equal tensors, the
library's own conversions (fused experts) included, from one file or several, through any number of stages.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_gpipe import Pipeline
from hf_gpipe.adapters.observation.skeleton import Blueprint, build
from hf_gpipe.adapters.observation.tiny import tiny_config
from tests.checkpoint.test_stage_weights import assert_equal, load_plain, saved

FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "gpt2": {},
    "gemma2": {},
    "bloom": {},
    "mixtral": {},
    "qwen3_moe": {},
    "deepseek_v3": {},
    "t5": {},
    "mt5": {},
    "m2m_100": {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    "marian": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(family: str, tmp_path: Path) -> None:
    place = list(FAMILIES).index(family)
    num_files = (1, 5)[place % 2]
    config = tiny_config(CONFIG_MAPPING[family](**FAMILIES[family]))
    torch.manual_seed(0)
    plain = build(Blueprint(config))
    total = sum(p.numel() * p.element_size() for p in plain.parameters())
    kilobytes = 2 * total // 1000 if num_files == 1 else int(total / (num_files - 0.8) / 1000)
    source = tmp_path / "source"
    plain.save_pretrained(source, max_shard_size=f"{kilobytes}KB")
    files = len(list(source.glob("*.safetensors")))
    assert files == 1 if num_files == 1 else files >= num_files
    expected = saved(source)
    # Both numbers of files go through all numbers of stages, two with a family, and two with the second one after it.
    others = place // 2 % 2
    for num_stages in (1 + others, 3 + others):
        target = tmp_path / f"k{num_stages}"
        Pipeline(source, num_stages).save_pretrained(target)
        assert_equal(saved(target), expected)
        assert_equal(dict(load_plain(target).state_dict()), dict(plain.state_dict()))
