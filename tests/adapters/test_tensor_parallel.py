"""The layers of tiny models, divided among ranks that are threads: families, cuts, and the loss of a part."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_gpipe.adapters import Blueprint, StageModel, adapter_for, build_adapter
from hf_gpipe.adapters.modules.quantised import is_4bit, size_of_quantised
from hf_gpipe.adapters.modules.weight_gradients import Product
from hf_gpipe.adapters.observation import tiny
from hf_gpipe.adapters.parts.cuts import Cut, Heads, VocabularyPart, dealt, scaled
from hf_gpipe.adapters.peft_resolve import resolve_peft
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.errors import CheckpointError, UnsupportedModelError, UserError
from hf_gpipe.losses.loss import TokenLoss
from hf_gpipe.losses.token_metrics import TokenMetrics
from hf_gpipe.model import clone
from hf_gpipe.model.assembly import assemble
from hf_gpipe.model.clone import exact_clone, padded_batch
from hf_gpipe.modes.tensor_parallel import plan as plans
from hf_gpipe.modes.tensor_parallel.adapted import plan_of
from hf_gpipe.modes.tensor_parallel.check import check_division, divided
from hf_gpipe.pipeline import probe
from hf_gpipe.pipeline.clone_steps import divided_steps
from hf_gpipe.pipeline.emulated_ranks import EmulatedRanks, emulate
from hf_gpipe.pipeline.probe import PROBE
from hf_gpipe.pipeline.variant import Variant
from hf_gpipe.planner.costs.layers import ModelLayers
from hf_gpipe.settings.division import Division
from scripts.bench.models import quantisation

FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "gpt2", "opt", "bloom", "gpt_neox", "bert"),
    *("t5", "marian", "bart", "m2m_100", "pegasus", "mbart", "mvp", "nllb-moe", "switch_transformers"),
    *("qwen2_moe", "qwen3_moe"),
)
#: T and numbers of heads: in whole groups or with fewer groups than ranks, evenly or not; and widths.
UNEVEN = (
    ("llama", 4, {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8, "intermediate_size": 70}),
    ("llama", 2, {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 33}),
    ("llama", 3, {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}),
    ("llama", 2, {"num_key_value_heads": 1}),
    ("qwen2", 4, {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 61}),
    ("qwen3_moe", 3, {"moe_intermediate_size": 16}),
    ("gpt2", 4, {"n_embd": 48, "n_head": 6, "n_inner": 50, "vocab_size": 61}),
    ("t5", 4, {"num_heads": 6, "d_ff": 50, "vocab_size": 61}),
    *(
        (one, 4, {"d_model": 48, "encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_ffn_dim": 50})
        for one in ("marian", "bart")
    ),
    ("bert", 3, {}),
    ("bloom", 3, {}),
    ("phi3", 3, {"num_key_value_heads": 2}),
    ("phi3", 4, {"num_key_value_heads": 2}),
)


#: Families, T and sizes: norms and dropout of parts of the positions, which T does not divide.


def require_divided(adapter: Any, num_ranks: int) -> None:
    """Raise UserError where a tiny clone that is divided as the model computes something else."""
    PROBE.require(adapter, divided(adapter, num_ranks))


def difference(config: PreTrainedConfig, size: int, given: dict[str, int] | None = None) -> float:
    """Of a tiny clone of two blocks a stack, with the sizes that are given, divided and whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "NUM_BLOCKS", 2)
        for name in tiny.BLOCK_COUNTS:
            patch.setitem(tiny._SIZES, name, 2)

        def with_sizes(config: PreTrainedConfig) -> PreTrainedConfig:
            made = tiny.tiny_config(config)
            made.update(given or {})
            return made

        patch.setattr(clone, "tiny_config", with_sizes)
        model = exact_clone(config, torch.float64)
    adapter = build_adapter(Blueprint(model.config, torch.float64, "eager", type(model)))
    (expected,) = divided_steps(model, adapter, padded_batch(model), Variant())
    steps = divided_steps(model, adapter, padded_batch(model), Variant(ranks=size))
    return max(step.difference(expected) for step in steps)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_divided_clone_has_the_loss_and_every_gradient(family: str) -> None:
    assert difference(CONFIG_MAPPING[family](), 2) < 1e-10


@pytest.mark.parametrize("family", ["opt", "gpt2", "bart", "gemma2"])
def test_the_head_is_divided(family: str) -> None:
    assert "head" in plan_of(adapter_of(CONFIG_MAPPING[family](num_hidden_layers=2)), 2).modules.values()


@pytest.mark.parametrize(("family", "size", "given"), UNEVEN)
def test_heads_and_widths_need_not_be_even(family: str, size: int, given: dict[str, int]) -> None:
    assert difference(CONFIG_MAPPING[family](), size, given) < (1e-7 if family == "qwen3_moe" else 1e-10)


def test_weights_get_their_gradients_while_that_of_the_input_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Llama's block: those of gate and up, and of q, k and v, each between the beginning and the end of a sum; on
    two ranks, of two micro-batches."""
    events: list[str] = []

    def begin_total(ranks: EmulatedRanks, tensor: torch.Tensor) -> Any:
        total = ranks.total(tensor)
        events.append("(")
        return lambda: events.append(")") or total

    def add(product: Product) -> None:
        events.append("w")
        plain_add(product)

    plain_add = Product.add
    monkeypatch.setattr(EmulatedRanks, "begin_total", begin_total)
    monkeypatch.setattr(Product, "add", add)
    assert difference(CONFIG_MAPPING["llama"](), 2, {"num_hidden_layers": 1}) < 1e-10
    assert ["".join(events).count(one) for one in ("(ww)", "(www)", "(")] == [4, 4, 8]


def test_a_given_model_stays_as_it_is_and_ranks_that_differ_are_found() -> None:
    """It shared with the stages what is whole; and whole weights that differ were saved as the first rank had them."""
    model = exact_clone(Qwen3Config(), torch.float64)
    adapter = build_adapter(Blueprint(model.config, torch.float64, "eager", type(model)))
    given = {parameter.data_ptr() for parameter in model.parameters()}

    def of_rank(ranks: EmulatedRanks, *, differs: bool) -> None:
        stage = assemble(adapter, range(len(adapter.layers)), model, torch.device("cpu"), ranks=ranks)
        assert given.isdisjoint(parameter.data_ptr() for parameter in stage.parameters.values())
        name = "model.norm.weight"
        stage.parameters[name].data[3] += ranks.place * differs * 1e-15
        stage.division.whole(name, stage.parameters[name])

    emulate(Division(2), partial(of_rank, differs=False))
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    with pytest.raises(CheckpointError, match=r"rank 1 of the 2 that share a stage has another model.norm.weight"):
        emulate(Division(2), partial(of_rank, differs=True))


def adapted(config: PreTrainedConfig, lora: Any) -> tuple[Any, TextAdapter]:
    """A clone with adapters that change its results, under a name that is no word."""
    peft = pytest.importorskip("peft")
    plain = exact_clone(config, torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(plain, lora, "my-lora").get_base_model().double()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    adapter = build_adapter(Blueprint(model.config, torch.float64, "eager", type(plain)))
    resolve_peft(adapter, "my-lora", lora, is_new=False)
    return model, adapter


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens", "norm"]}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj", "wte"], "fan_in_fan_out": True}),
        ("gpt2", {"target_modules": ["c_fc"], "fan_in_fan_out": True, "modules_to_save": ["wte"]}),
        ("bart", {"target_modules": "all-linear", "lora_bias": True, "exclude_modules": ["lm_head"]}),
        ("qwen2_moe", {"target_modules": ["k_proj", "gate_proj"]}),
        ("qwen3", {"target_modules": ["v_proj"], "modules_to_save": ["q_norm", "o_proj", "lm_head"]}),
    ],
)
def test_adapters_of_a_divided_clone_have_every_gradient(family: str, options: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    shared = {"num_key_value_heads": 1} if family == "llama" else {}
    model, adapter = adapted(CONFIG_MAPPING[family](**shared), peft.LoraConfig(r=4, **options))
    (expected,) = divided_steps(model, adapter, padded_batch(model), Variant())
    assert any("lora_" in name for name in expected.gradients)
    assert "head" in plan_of(adapter, 2).modules.values() or "lm_head" in options["target_modules"], "it is divided"
    assert (
        max(step.difference(expected) for step in divided_steps(model, adapter, padded_batch(model), Variant(ranks=2)))
        < 1e-10
    )


def test_adapters_and_quantised_weights_that_cannot_be_divided_are_errors() -> None:
    peft, _ = pytest.importorskip("peft"), pytest.importorskip("bitsandbytes")
    config = CONFIG_MAPPING["qwen3_moe"](num_hidden_layers=2, hidden_size=32, num_attention_heads=4, head_dim=8)
    config._experts_implementation, linear = "eager", ["q_proj"]
    for given, message in (
        (peft.LoraConfig(target_modules=linear, use_dora=True), "peft_config has DoraLinear, a form of LoRA"),
        (peft.LoraConfig(target_modules=linear, trainable_token_indices=[3]), "has trainable_token_indices"),
        (peft.LoraConfig(target_modules=linear, target_parameters=["mlp.experts.down_proj"]), "target_parameters"),
        (peft.LoHaConfig(target_modules=linear), "peft_config has peft_type LOHA"),
    ):
        adapter = adapter_of(config)
        resolve_peft(adapter, "default", given)
        with pytest.raises(UserError, match=rf"^tensor_parallel is 2 and .*{message}"):
            check_divided(adapter)
    small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    for kind, message in (("int8", "8 bits"), ("nf4", r"'model.layers.0.self_attn.o_proj' has 64 inputs.* 64 at a")):
        adapter = adapter_for(small, torch.float32, quantization_config=quantisation(kind))
        with pytest.raises(UserError, match=rf"^tensor_parallel is 2 and .*{message}"):
            check_divided(adapter)


@pytest.mark.parametrize(("kind", "shared"), [("nf4", 4), ("fp4+", 1)])
def test_parts_of_weights_of_4_bits_have_their_values(kind: str, shared: int) -> None:
    """Also as the planner sees them, without values, and where ranks have the same key-value head."""
    functional = pytest.importorskip("bitsandbytes").functional
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=shared)
    adapter = adapter_for(config, torch.float32, quantization_config=quantisation(kind))
    layers, cpu = range(len(adapter.layers)), torch.device("cpu")
    whole, plan = assemble(adapter, layers, None, cpu), plan_of(adapter, 2)
    expected = ModelLayers(adapter, Division(2)).sizes
    for place in range(2):

        def of_rank(ranks: EmulatedRanks) -> StageModel:
            return assemble(adapter, layers, None, cpu, ranks=ranks)

        stage = emulate(Division(2), of_rank)[place]
        for name, part in stage.parameters.items():
            assert place == 0 or size_of_quantised(part) == (expected[name].count, expected[name].num_bytes)
            if not is_4bit(part):
                continue
            weight = whole.parameters[name]
            values = functional.dequantize_4bit(weight.data, weight.quant_state)
            found = functional.dequantize_4bit(part.data, part.quant_state)
            assert torch.equal(found, plan.cuts[name].part(values, place)), name


def check_divided(adapter: TextAdapter, *, is_compiled: bool = False) -> None:
    check_division(adapter, Division(2), PROBE, is_compiled=is_compiled)


def adapter_of(config: PreTrainedConfig) -> TextAdapter:
    return adapter_for(config, torch.float32, "eager")


def test_what_cannot_be_divided_is_an_error_with_the_name() -> None:
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 40}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3}
    with pytest.raises(UserError, match=r"tensor_parallel is 4 and 'model.layers.0.self_attn' has 3 heads.* at most 3"):
        require_divided(adapter_of(LlamaConfig(**sizes, **heads)), 4)
    with pytest.raises(UserError, match=r"tensor_parallel is 4 and .*gate_proj' has 3 columns.* at most 3"):
        require_divided(adapter_of(LlamaConfig(**sizes | {"intermediate_size": 3}, num_attention_heads=4)), 4)
    with pytest.raises(UnsupportedModelError, match=r"'deepseek_v3' cannot be divided: no rule divides its layer"):
        require_divided(adapter_of(CONFIG_MAPPING["deepseek_v3"](num_hidden_layers=2)), 2)


def test_a_wrong_division_is_found_before_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of norms of heads, which each rank computes from its own heads, are summed; without that they
    would be wrong and nothing would fail."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    config = Qwen3Config(hidden_size=32, intermediate_size=32, num_hidden_layers=2, **heads)
    monkeypatch.setattr(probe, "compared_once", lambda adapter, what, compare: compare())
    require_divided(adapter_of(config), 2)
    of = plans.SplitPlan.of.__func__  # type: ignore[attr-defined]

    def without_shared(cls: Any, *args: Any) -> Any:
        return replace(of(cls, *args), shared=set())

    monkeypatch.setattr(plans.SplitPlan, "of", classmethod(without_shared))
    with pytest.raises(UnsupportedModelError, match="qwen3: with tensor_parallel a tiny clone has other gradients"):
        require_divided(adapter_of(config), 2)


def test_masks_are_compared_and_the_dropout_of_sdpa_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    compared: list[str] = []
    monkeypatch.setattr(probe, "compared_once", lambda adapter, what, compare: compared.append(what))
    for probability in (0.1, 0.2):
        config.attention_dropout = probability
        require_divided(adapter_for(config, torch.float32, "eager"), 2)
    assert len(set(compared)) == 2, "another probability is another comparison"
    monkeypatch.undo()
    require_divided(adapter_for(config, torch.float32, "eager"), 2)
    with pytest.raises(UserError, match="use attn_implementation eager"):
        require_divided(adapter_for(config, torch.float32, "sdpa"), 2)


def test_compiled_blocks_with_dropout_are_refused() -> None:
    """With the backend eager masks were drawn twice, so numbers depended on T."""
    peft = pytest.importorskip("peft")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    of_model, of_lora = adapter_of(LlamaConfig(**sizes, attention_dropout=0.1)), adapter_of(LlamaConfig(**sizes))
    check_divided(of_lora, is_compiled=True)
    resolve_peft(of_lora, "default", peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.3))
    for adapter, message in ((of_model, "attention_dropout is 0.1"), (of_lora, "lora_dropout is 0.3")):
        check_divided(adapter)
        with pytest.raises(UserError, match=f"^tensor_parallel is 2, torch_compile is true and {message}"):
            check_divided(adapter, is_compiled=True)


SIX_AND_TWO = Heads.of(6, 2, 3)


@pytest.mark.parametrize(
    "cut",
    [
        Cut.from_packs(0, [dealt(7, 3)]),
        Cut.from_packs(1, [dealt(6, 4), dealt(6, 4)]),
        Cut.from_packs(1, [scaled(Heads.of(4, 2, 4).pairs, 6)]),
        Cut.from_packs(1, [scaled(one, 2) for one in (SIX_AND_TWO.queries, SIX_AND_TWO.pairs, SIX_AND_TWO.pairs)]),
    ],
)
def test_a_whole_tensor_comes_back_bit_for_bit(cut: Cut) -> None:
    shape = cut.whole_shape(torch.empty(7, 2))
    whole = torch.randn(shape).masked_fill(torch.rand(shape) < 0.2, -0.0)

    def back(ranks: EmulatedRanks) -> torch.Tensor:
        return cut.gathered(cut.part(whole, ranks.place).contiguous(), ranks)

    for found in emulate(Division(len(cut.parts)), back):
        assert torch.equal(found.view(torch.int32), whole.view(torch.int32))
    parts = [cut.part(whole, place) for place in range(len(cut.parts))]
    counted = [one for place, part in enumerate(parts) for one in cut.counted(part, place)]
    assert sum(one.numel() for one in counted) == whole.numel()
    assert sum(one.square().sum() for one in counted) == pytest.approx(float(whole.square().sum()), rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "logit_clipping": 0.7}, {"is_dynamic": True}])
def test_the_loss_of_parts_of_the_vocabulary_is_that_of_the_whole(options: dict[str, Any]) -> None:
    size, tokens = 3, 11
    logits = torch.randn(6, tokens, dtype=torch.float64)
    logits[0, 2] = logits[0, 9] = 5.0  # the first of two equal ones counts
    targets = torch.tensor([9, 3, -100, 10, 0, 7])
    cut = Cut.from_packs(1, [dealt(tokens, size)])
    of = (0, 0)

    def one(part: VocabularyPart | None, own: torch.Tensor) -> tuple[Any, ...]:
        loss = TokenLoss(**options, metrics=TokenMetrics().of(of, is_training=True))
        losses, gradient = loss.with_gradient(own.clone(), targets, overwrite=True, part=part)
        assert loss.metrics is not None
        return losses, gradient, loss.metrics.take(is_training=True)[of]

    losses, gradient, metrics = one(None, logits)

    def of_rank(ranks: EmulatedRanks) -> tuple[Any, ...]:
        first = cut.parts[ranks.place][0][0]
        return one(VocabularyPart(first, tokens, ranks), cut.part(logits, ranks.place))

    for place, (found, own, noted) in enumerate(emulate(Division(size), of_rank)):
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(own[targets != -100], cut.part(gradient, place)[targets != -100])
        assert noted == pytest.approx(metrics)
