"""`hf-gpipe merge`: every weight is bit for bit that of peft's `merge_and_unload`, shard by shard."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    MixtralConfig,
    PreTrainedModel,
)

from hf_gpipe import Pipeline
from hf_gpipe.__main__ import main
from hf_gpipe.checkpoint.digests import Digests
from hf_gpipe.data import train_tokenizer
from hf_gpipe.errors import UserError
from hf_gpipe.model.merging import merge
from hf_gpipe.model.spec import ModelSpec
from tests.oracle import plain_model, tiny_config

peft = pytest.importorskip("peft")
LINEAR = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
LLAMA: dict[str, dict[str, Any]] = {
    "rank and alpha of some": {"rank_pattern": {"v_proj": 5}, "alpha_pattern": {"layers.1.self_attn.q_proj": 32}},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "biases": {"bias": "all", "layers_to_transform": [1]},
    "norm": {"modules_to_save": ["norm"]},
    "targets inside of a whole module": {"modules_to_save": ["layers.1.mlp"]},
    "embedding and head": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "whole modules": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "whole and tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "pissa": {"init_lora_weights": "pissa"},
    "tokens": {"trainable_token_indices": [3, 5, 9]},
}
MIXTRAL = MixtralConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_local_experts=3,
)


def saved(folder: Path, config: Any, dtype: torch.dtype, auto: Any, **options: Any) -> PreTrainedModel:
    """Saves a tiny model and adapters on it that are not as they begin; returns what peft makes of the two files."""
    torch.manual_seed(0)
    auto.from_config(config, dtype=dtype).save_pretrained(folder / "base")
    base = auto.from_pretrained(folder / "base", dtype="auto")
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=7, **options))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    adapted.save_pretrained(folder / "adapters")
    plain = auto.from_pretrained(folder / "base", dtype="auto")
    return peft.PeftModel.from_pretrained(plain, folder / "adapters").merge_and_unload()


def assert_merged(folder: Path, expected: PreTrainedModel, shard_bytes: int, auto: Any) -> None:
    spec = ModelSpec.of(str(folder / "base"), peft_config=folder / "adapters")
    assert merge(spec, folder / "merged", shard_bytes=shard_bytes) > 1
    expected.save_pretrained(folder / "by peft")
    files, wanted = ({}, {})
    for name, found in (("merged", files), ("by peft", wanted)):
        for file in (folder / name).glob("*.safetensors"):
            found |= load_file(file)
    assert files.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert files[name].dtype == tensor.dtype
        assert torch.equal(files[name], tensor), name
    again = auto.from_pretrained(folder / "merged", dtype="auto").state_dict()
    assert all(torch.equal(tensor, again[name].to(tensor)) for name, tensor in expected.state_dict().items())
    digests = Digests.read(folder / "merged")
    assert digests is not None
    digests.check_share(0, 1)


#: Cases in which more is computed than in others, or is rounded in another place.
ROUNDED = ("rank and alpha of some", "dora", "rslora", "embedding and head", "whole and tied", "pissa")


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, torch.float32) for case in LLAMA), *((case, torch.bfloat16) for case in ROUNDED)]
)
def test_every_bit_of_a_llama(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tied = case in ("whole modules", "whole and tied", "tokens")
    config = tiny_config("llama", tied=tied, attention_bias=True)
    expected = saved(tmp_path, config, dtype, AutoModelForCausalLM, **(LINEAR | LLAMA[case]))
    assert_merged(tmp_path, expected, 3000, AutoModelForCausalLM)
    is_tied = json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"]
    assert is_tied == (tied and case != "whole modules") == expected.config.tie_word_embeddings
    if dtype == torch.float32 and case in ("dora", "whole modules", "tokens"):
        # The pipeline that the merged model is, and plain peft with the adapters beside their layers.
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        plain = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
        ids = torch.tensor([[3, 5, 9], [7, 4, 11]])
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        found = Pipeline(str(tmp_path / "merged"), 2).generate(input_ids=ids, **options)
        assert found.tolist() == plain.generate(input_ids=ids, **options).tolist()


FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt2": (
        GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=3, n_head=2),
        AutoModelForCausalLM,
        {"target_modules": ["c_attn", "c_proj"], "use_dora": True},
    ),
    "mixtral": (
        MIXTRAL,
        AutoModelForCausalLM,
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "marian": (tiny_config("marian"), AutoModelForSeq2SeqLM, {"target_modules": ["q_proj", "fc1"]}),
    "classifier": (
        tiny_config("llama", num_labels=3),
        AutoModelForSequenceClassification,
        LINEAR | {"task_type": "SEQ_CLS"},
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_bit_of_other_families(name: str, tmp_path: Path) -> None:
    config, auto, options = FAMILIES[name]
    assert_merged(tmp_path, saved(tmp_path, config, torch.bfloat16, auto, **options), 2000, auto)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A classifier's adapters on a language model: the head is theirs, the tokenizer and the rest are the model's."""
    config = tiny_config("llama", num_labels=1)
    config.vocab_size = 290
    expected = saved(tmp_path, config, torch.float32, AutoModelForSequenceClassification, task_type="SEQ_CLS", **LINEAR)
    language = plain_model(config, dtype=torch.float32)
    language.model.load_state_dict(
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "base").model.state_dict()
    )
    shutil.rmtree(tmp_path / "base")
    language.generation_config.max_new_tokens = 17
    language.save_pretrained(tmp_path / "base")
    train_tokenizer(["one two three four"] * 20, 290, tmp_path / "base", model="bpe")
    (tmp_path / "base/vocab.json").write_bytes(b"as it is")
    config.id2label, config.label2id = {0: "good"}, {"good": 0}
    config.save_pretrained(tmp_path / "adapters")  # as our trainers do
    asked = ["merge", str(tmp_path / "adapters"), "--output", str(tmp_path / "merged")]
    assert main(asked) == 0
    assert "1 shard" in capsys.readouterr().out
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.state_dict().items())
    assert json.loads((tmp_path / "merged/config.json").read_text())["label2id"] == {"good": 0}
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("one two")["input_ids"]
    for name in ("tokenizer.json", "vocab.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "base" / name).read_bytes()
    assert main(asked) == 2
    assert "is not an empty directory; choose another output" in capsys.readouterr().err
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main([*asked[:-1], "."]) == 0
    assert (tmp_path / "here" / "config.json").exists()


def test_the_full_weights_of_a_quantised_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Adapters that were trained on a 4-bit checkpoint, merged into the weights that it was made of."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    expected = saved(tmp_path, tiny_config("llama"), torch.float32, AutoModelForCausalLM, **LINEAR)
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=bits, device_map={"": "cpu"})
    small.save_pretrained(tmp_path / "bits")
    file = tmp_path / "adapters/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(tmp_path / "bits")}))
    asked = ["merge", str(tmp_path / "adapters"), "--output", str(tmp_path / "merged")]
    assert main(asked) == 2
    assert "are quantised, and merging would round them once more; give the model" in capsys.readouterr().err
    assert main([*asked, "--base", str(tmp_path / "base")]) == 0
    assert "without a tokenizer, as neither" in capsys.readouterr().out
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.state_dict().items())


def test_adapters_that_no_stage_can_hold(tmp_path: Path) -> None:
    saved(tmp_path, tiny_config("llama"), torch.float32, AutoModelForCausalLM, **LINEAR, lora_bias=False)
    base = str(tmp_path / "base")
    with pytest.raises(UserError, match="layer_replication of the adapters is not supported"):
        Pipeline(base, 2, 2, peft_config=peft.LoraConfig(**LINEAR, layer_replication=[(0, 2), (1, 3)]))
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**LINEAR, lora_bias=True))
    adapted.save_pretrained(tmp_path / "biased")
    with pytest.raises(UserError, match="has no bias, into which peft could merge"):
        merge(ModelSpec.of(base, peft_config=tmp_path / "biased"), tmp_path / "merged")


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, tiny_config("llama"), torch.float32, AutoModelForCausalLM, target_modules=["q_proj", "lm_head"])

    def said(folder: Path) -> str:
        assert main(["merge", str(folder), "--output", str(tmp_path / "merged")]) == 2
        assert not (tmp_path / "merged").exists()
        assert not list(tmp_path.glob(".*"))
        return capsys.readouterr().err

    assert "'lm_head' has adapters, and its weight is also 'model.embed_tokens.weight'" in said(tmp_path / "adapters")
    assert "there is no adapter_config.json" in said(tmp_path / "base")
    shutil.rmtree(tmp_path / "base")
    saved(tmp_path, tiny_config("llama"), torch.float32, AutoModelForCausalLM, **LINEAR)
    file = tmp_path / "adapters/adapter_model.safetensors"
    tensors = load_file(file)
    first = next(iter(tensors))
    for changed, message in (
        (tensors | {"base_model.model.extra": torch.ones(1)}, "has 'base_model.model.extra', which is no adapter"),
        ({name: one for name, one in tensors.items() if name != first}, f"lacks {first!r}"),
        (tensors | {first: torch.ones(2)}, "has the shape (2,)"),
    ):
        save_file(changed, file)
        assert message in said(tmp_path / "adapters")
    file.write_bytes(b"\xff" * 64)
    assert "cannot read the adapters in" in said(tmp_path / "adapters")
