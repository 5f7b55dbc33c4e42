"""Every method of peft: training in stages is that of the plain model with it, or one error names the method."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_gpipe import Pipeline
from hf_gpipe.errors import UnsupportedModelError
from tests.oracle import assert_same, padded_batch, plain_model, run_pipeline, run_plain, tiny_config

peft = pytest.importorskip("peft")

TARGETS = ["q_proj", "down_proj"]
#: Options that a method needs for layers as small as these.
OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10, "tinit": 1, "tfinal": 1},
    "ADAPTION_PROMPT": {"adapter_len": 3, "adapter_layers": 2, "target_modules": None},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 4},
    "FOURIERFT": {"n_frequency": 10},
    "GRALORA": {"r": 4, "gralora_k": 2},
    "HRA": {"r": 4},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MISS": {"r": 4},
    "OFT": {"r": 0, "oft_block_size": 4},
    "PSOFT": {"r": 4},
    "RANDLORA": {"r": 4},
    "ROAD": {"group_size": 4},
    "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"token_indices": [5, 6], "target_modules": ["embed_tokens"]},
    "VBLORA": {"vector_length": 4, "num_vectors": 8, "topk": 2},
    "WAVEFT": {"n_frequency": 10},
}
#: Those whose layers are all that there is of them.
HELD = {
    *("LORA", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "GLORA", "GRALORA", "HIRA", "HRA", "IA3"),
    *("LN_TUNING", "LOHA", "LOKR", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "ROAD", "SUPERTUNING"),
    *("TRAINABLE_TOKENS", "WAVEFT"),
}
METHODS = [method.value for method in peft.PEFT_TYPE_TO_CONFIG_MAPPING]
LORAS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "bias": {"bias": "all", "lora_bias": True},
    "ranks": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}, "layers_to_transform": [0, 2]},
    "qalora": {"use_qalora": True, "qalora_group_size": 4},
    "parameters": {"target_parameters": ["mlp.up_proj.weight"], "use_rslora": True},
    "kasa": {"kasa_config": "KasaConfig"},
    "velora": {"velora_config": "VeloraConfig"},
    "monteclora": {"monteclora_config": "MontecloraConfig"},
}


def config_of(method: str) -> Any:
    made = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(method)]
    fields = made.__dataclass_fields__
    options = {"target_modules": TARGETS} if "target_modules" in fields else {}
    options |= {"num_virtual_tokens": 3} if "num_virtual_tokens" in fields else {}
    try:
        return made(task_type="CAUSAL_LM", **options | OPTIONS.get(method, {}))
    except ImportError as error:
        pytest.skip(str(error))


def check_held(config: Any, tmp_path: Path) -> None:
    """New adapters do not depend on the split, train as the plain model's, and are saved as PEFT saves them."""
    method = config.peft_type.value
    base = plain_model(tiny_config("llama"), dtype=torch.float32 if method == "PSOFT" else torch.float64)
    one, pipe = (Pipeline(copy.deepcopy(base), k, 2, seed=3, peft_config=copy.deepcopy(config)) for k in (1, 3))
    mine, of_one = dict(pipe.named_parameters()), dict(one.named_parameters())
    wrapped = peft.get_peft_model(base, config)
    plain = wrapped.get_base_model()
    own = dict(plain.named_parameters())
    assert own.keys() == mine.keys()
    with torch.no_grad():
        for name, parameter in mine.items():
            assert torch.equal(parameter, of_one[name]), name
            assert parameter.requires_grad == own[name].requires_grad, name
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape).to(parameter))
            own[name].copy_(parameter)
    batch = padded_batch(base.config)
    # Some compute in float32 within their layers.
    is_rounded = method in ("C3A", "PSOFT") or getattr(config, "kasa_config", None) is not None
    tolerance = 1e-5 if method == "PSOFT" else 1e-6 if is_rounded else 1e-9
    assert_same(run_pipeline(pipe, batch), run_plain(plain, batch, 2), tolerance=tolerance)
    pipe.save_pretrained(tmp_path / "pipeline")
    wrapped.save_pretrained(tmp_path / "plain")
    found, saved = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("pipeline", "plain"))
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_exact_or_an_error_by_its_name(method: str, tmp_path: Path) -> None:
    config = config_of(method)
    if method in HELD:
        check_held(config, tmp_path)
        return
    with pytest.raises(UnsupportedModelError, match=f"^llama: peft's {method}"):
        Pipeline(tiny_config("llama"), 2, peft_config=config)
    if not config.is_prompt_learning and method != "XLORA":  # PEFT itself asks for more there
        wrapped = peft.get_peft_model(plain_model(tiny_config("llama")), config)
        with pytest.raises(UnsupportedModelError, match=f"^llama: peft's {method}"):
            Pipeline(wrapped, 2)


@pytest.mark.parametrize("layers", ["mlp.up_proj.weight", "layers.2.mlp.up_proj.weight"])
def test_parameters_alone_get_adapters(layers: str, tmp_path: Path) -> None:
    """Without target_modules no adapters were made, and the error was that no parameter requires a gradient."""
    check_held(peft.LoraConfig(r=4, target_parameters=[layers]), tmp_path)


@pytest.mark.parametrize("name", LORAS)
def test_options_of_lora(name: str, tmp_path: Path) -> None:
    if missing := LORAS[name].keys() - peft.LoraConfig.__dataclass_fields__.keys():
        pytest.skip(f"this peft has no {min(missing)}")
    from peft.tuners.lora import config as classes

    options = {key: getattr(classes, v)() if key.endswith("_config") else v for key, v in LORAS[name].items()}
    config = peft.LoraConfig(r=4, target_modules=TARGETS, **options)
    if name not in ("velora", "monteclora"):
        check_held(config, tmp_path)
        return
    with pytest.raises(UnsupportedModelError, match=f"llama: {name}_config of the adapters is not supported"):
        Pipeline(tiny_config("llama"), 2, peft_config=config)
