"""Depth-scaled feed-forward initialisation: which weights, and how much smaller they start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_gpipe import Pipeline, transformer_config
from hf_gpipe.adapters import adapter_for
from hf_gpipe.adapters.feed_forward import OUTPUT_OF, feed_forward_outputs
from hf_gpipe.errors import UnsupportedModelError, UserError
from hf_gpipe.model.clone import exact_clone
from scripts.families import default_config
from tests.oracle import VOCABULARY, plain_model, tiny_config


def small(family: str) -> PreTrainedConfig:
    if family == "t5":
        config = transformer_config("T(3, 24, 2)", d_model=16, vocab_size=VOCABULARY, d_kv=4)
        config.num_decoder_layers = 2
        return config
    return tiny_config(family)


def weights(config: PreTrainedConfig, num_stages: int, **arguments: object) -> dict[str, torch.Tensor]:
    pipe = Pipeline(config, num_stages, seed=5, device="cpu", **arguments)
    return {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}


@pytest.mark.parametrize("family", ["t5", "llama", "bart", "marian"])
def test_the_last_projections_start_smaller_by_the_layers_of_their_stack(family: str) -> None:
    config = small(family)
    usual = weights(config, 1, dtype=torch.float64)
    scaled = weights(config, 1, dtype=torch.float64, depth_scaled_feed_forward=True)
    ending = f".{OUTPUT_OF[family]}.weight"
    changed = {name for name in usual if not torch.equal(usual[name], scaled[name])}
    assert changed == {name for name in usual if name.endswith(ending)}
    for name in changed:
        num_layers = {"t5": 3 if "encoder" in name else 2, "llama": 3}.get(family, 2)
        torch.testing.assert_close(scaled[name], usual[name] / num_layers, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["t5", "marian"])
def test_initial_weights_do_not_depend_on_the_split(family: str) -> None:
    config = small(family)
    expected = weights(config, 1, depth_scaled_feed_forward=True)
    for num_stages in (2, 3, len(adapter_for(config).layers)):
        found = weights(config, num_stages, depth_scaled_feed_forward=True)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), num_stages


def effect(family: str, ending: str) -> float:
    """How much the logits of a tiny model change when its projections of this name are multiplied by four, not two."""
    model = exact_clone(default_config(family), torch.float32).eval()
    outputs = [module for name, module in model.named_modules() if name.endswith(f".{ending}")]
    ids = torch.arange(3, 21).view(2, 9)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    logits = []
    with torch.no_grad():
        for _ in range(2):
            for parameter in (parameter for module in outputs for parameter in module.parameters()):
                parameter.mul_(2)
            logits.append(model(**inputs).logits)
    return float((logits[1] - logits[0]).norm() / logits[0].norm())


@pytest.mark.parametrize("family", sorted(OUTPUT_OF))
def test_the_projections_of_every_family(family: str) -> None:
    """Each block has one such projection, it adds to the hidden states, and no norm after it undoes its scale."""
    adapter = adapter_for(exact_clone(default_config(family), torch.float32).config)
    outputs = feed_forward_outputs(adapter)
    assert list(outputs.values()) == [len(stack.blocks) for stack in adapter.stacks for _ in stack.blocks]
    for name in outputs:
        module = adapter.reference.get_submodule(name)
        # GPT-2's Conv1D has its weight the other way round.
        width = module.out_features if isinstance(module, nn.Linear) else module.nf
        assert width == adapter.stack_widths["decoder"]
    assert effect(family, OUTPUT_OF[family]) > 0.03


def test_a_norm_behind_the_projection_would_undo_the_scale() -> None:
    assert effect("gemma2", "mlp.down_proj") < 1e-3


def test_another_family_is_refused_by_name() -> None:
    """gemma2 normalises the output of its feed-forward layers, which would undo the scale."""
    config = exact_clone(default_config("gemma2"), torch.float32).config
    with pytest.raises(UnsupportedModelError, match=r"depth_scaled_feed_forward: for the family 'gemma2'.*t5"):
        Pipeline(config, 1, device="cpu", depth_scaled_feed_forward=True)


def test_a_model_that_has_its_weights_is_refused(tmp_path: Path) -> None:
    model = plain_model(tiny_config("llama"))
    model.save_pretrained(str(tmp_path))
    for source in (model, str(tmp_path)):
        with pytest.raises(UserError, match="depth_scaled_feed_forward is for a new model"):
            Pipeline(source, 1, device="cpu", depth_scaled_feed_forward=True)


def test_a_checkpoint_s_weights_are_not_scaled(tmp_path: Path) -> None:
    pipe = Pipeline(small("t5"), 2, device="cpu", depth_scaled_feed_forward=True)
    pipe.save_pretrained(str(tmp_path))
    before = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
    pipe.load_pretrained(str(tmp_path))
    assert all(torch.equal(parameter, before[name]) for name, parameter in pipe.named_parameters())
