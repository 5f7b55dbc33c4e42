"""A model whose Python code comes with its directory: off unless asked for, and compared before it is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from hf_gpipe import Pipeline
from hf_gpipe.errors import UserError
from tests.oracle import padded_batch, plain_model, tiny_config

CONFIGURATION = """
from transformers import LlamaConfig

class TunedConfig(LlamaConfig):
    model_type = "tuned_llama"
"""

MODELING = """
from transformers import LlamaForCausalLM
from .configuration_tuned import TunedConfig

class TunedForCausalLM(LlamaForCausalLM):
    config_class = TunedConfig
"""


def write_model(directory: Path) -> None:
    """A Hub directory with a Llama under another name, and the code that says so."""
    plain = plain_model(tiny_config("llama"), seed=3).float()
    values = plain.config.to_dict() | {
        "model_type": "tuned_llama",
        "architectures": ["TunedForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_tuned.TunedConfig",
            "AutoModelForCausalLM": "modeling_tuned.TunedForCausalLM",
        },
    }
    (directory / "config.json").write_text(json.dumps(values))
    (directory / "configuration_tuned.py").write_text(CONFIGURATION)
    (directory / "modeling_tuned.py").write_text(MODELING)
    state = {name: tensor for name, tensor in plain.state_dict().items() if name != "lm_head.weight"}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def test_remote_code_runs_only_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    write_model(directory)
    with pytest.raises(UserError, match="trust_remote_code"):
        Pipeline(directory, 2)
    compared = []
    monkeypatch.setattr(
        "hf_gpipe.pipeline.probe.verify", lambda adapter, variant: compared.append(adapter.config.model_type)
    )
    Pipeline(directory, 2, trust_remote_code=True)
    assert compared == ["tuned_llama"]
    monkeypatch.undo()
    pipe = Pipeline(directory, 2, 2, trust_remote_code=True)
    plain = plain_model(tiny_config("llama"), seed=3).float()
    batch = padded_batch(plain.config)
    expected = float(Pipeline(plain, 1, 2).train_step(batch))
    assert float(pipe.train_step(batch)) == pytest.approx(expected, rel=1e-5)
    pipe.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert type(loaded).__name__ == "TunedForCausalLM"
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name
