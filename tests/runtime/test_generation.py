"""Generation: token for token what the plain model generates, however it is split, on every process."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    GPT2Config,
    LogitsProcessor,
    LongcatFlashConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)
from transformers.generation.streamers import BaseStreamer

from hf_gpipe import Pipeline
from hf_gpipe.adapters import adapter_for
from hf_gpipe.errors import StageError, UnsupportedModelError, UserError
from hf_gpipe.libraries.transformers import cache_argument
from hf_gpipe.pipeline.generated import verify_generation
from hf_gpipe.pipeline.variant import Variant
from hf_gpipe.runtime.generate_arguments import UNSUPPORTED
from hf_gpipe.runtime.generation import Generator
from hf_gpipe.runtime.spread_rows import pipelines
from hf_gpipe.schedule.placement import Placement
from tests.gloo import run_gloo
from tests.oracle import VOCABULARY, padded_batch, plain_model, run_plain, tiny_config

METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "sampled beams": {"do_sample": True, "num_beams": 2},
    "no cache": {"use_cache": False},
    "forced first token": {"forced_bos_token_id": 7, "num_beams": 2},
}
FAMILIES = ("llama", "mistral", "qwen2", "marian", "m2m_100", "bart")


def config_of(family: str) -> PreTrainedConfig:
    """Tiny models with dropout, which generation must switch off, and with windows that the prompts overflow."""
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "attention_dropout": 0.3,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    if family == "mistral":
        return MistralConfig(sliding_window=4, **shape)
    if family == "qwen2":
        kinds = ["full_attention", "sliding_attention"] * 2
        return Qwen2Config(use_sliding_window=True, sliding_window=5, layer_types=kinds, **shape)
    if family == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 20}
        return GPT2Config(vocab_size=VOCABULARY, pad_token_id=0, eos_token_id=1, bos_token_id=2, **sizes)
    return tiny_config(family, tied=False, dropout=0.3)


@lru_cache
def sharp_model(family: str) -> PreTrainedModel:
    """A model whose tokens depend on all that it has read: weights so large that attention picks out positions."""
    model = plain_model(config_of(family))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.7, generator=generator)
    model.set_attn_implementation("sdpa")  # eager attention makes nan of rows of padding in float64
    return model.eval()


def prompts(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Four rows of unequal length: padded on the right for an encoder, on the left for a decoder."""
    ids = torch.randint(3, VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(7) >= torch.arange(4)[:, None]).long()
    if model.config.is_encoder_decoder:
        mask = mask.flip(1)
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@lru_cache
def split_model(family: str, num_stages: int) -> Pipeline:
    return Pipeline(sharp_model(family), num_stages)


def plain_tokens(model: PreTrainedModel, **options: Any) -> torch.Tensor:
    torch.manual_seed(5)
    return model.generate(**prompts(model), max_new_tokens=10, **options)


@pytest.mark.parametrize(
    ("family", "method"),
    [(family, method) for family in FAMILIES for method in METHODS if method in ("greedy", "beams")]
    + [(family, method) for family in ("llama", "marian") for method in METHODS if method not in ("greedy", "beams")],
)
def test_tokens_of_the_plain_model(family: str, method: str) -> None:
    model = sharp_model(family)
    expected = plain_tokens(model, **METHODS[method])
    assert len({tuple(row) for row in expected[:, -10:].tolist()}) > 1, "rows that differ make the test a test"
    num_layers = len(split_model(family, 1).adapter.layers)
    for num_stages in (1, 3, num_layers):
        pipe = split_model(family, num_stages)
        torch.manual_seed(5)
        found = pipe.generate(**prompts(model), max_new_tokens=10, **METHODS[method])
        assert torch.equal(found, expected), f"{num_stages} stages"
        assert all(stage.model.training for stage in pipe.models.values())


@pytest.mark.parametrize("family", ["llama", "marian"])
def test_any_cut_between_two_stages(family: str) -> None:
    model = sharp_model(family)
    expected = plain_tokens(model, num_beams=2)
    num_layers = len(Pipeline(model, 1).adapter.layers)
    for position in range(1, num_layers):
        pipe = Pipeline(model, 2, partition=[position, num_layers - position])
        assert torch.equal(pipe.generate(**prompts(model), max_new_tokens=10, num_beams=2), expected), position


@pytest.mark.parametrize(("encoder_layers", "decoder_layers"), [(3, 1), (1, 3)])
def test_stacks_of_unequal_depth(encoder_layers: int, decoder_layers: int) -> None:
    model = plain_model(
        tiny_config("marian", tied=False, encoder_layers=encoder_layers, decoder_layers=decoder_layers)
    ).eval()
    found = Pipeline(model, 3).generate(**prompts(model), max_new_tokens=10)
    assert torch.equal(found, plain_tokens(model))


def test_prompt_in_chunks_and_without_a_mask() -> None:
    model = sharp_model("llama")
    pipe = Pipeline(model, 3)
    assert torch.equal(pipe.generate(**prompts(model), max_new_tokens=10, prefill_chunk_size=3), plain_tokens(model))
    ids = prompts(model)["input_ids"][:1]
    found = pipe.generate(input_ids=ids, max_new_tokens=10)
    assert torch.equal(found, model.generate(input_ids=ids, max_new_tokens=10))


def test_blocks_with_two_attentions_each() -> None:
    """LongCat-Flash's second half of slots was taken for that of other stages, and was not reordered with the beams."""
    verify_generation(adapter_for(LongcatFlashConfig()), Variant(generates=True))


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_cache_that_the_model_drops(num_stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3 forgets its keys where a text outgrows its short rotations; the stages then ran every token once more."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8}
    rope |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [4.0, 3.0, 2.0, 6.0]}
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Phi3Config(
        vocab_size=VOCABULARY, pad_token_id=0, eos_token_id=None, initializer_range=0.7, rope_parameters=rope, **shape
    )
    config.original_max_position_embeddings = 8
    model = plain_model(config).eval()
    ids = torch.arange(3, 15).view(2, 6)
    options = {"input_ids": ids, "max_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True}
    lengths: list[int] = []
    with model.register_forward_pre_hook(
        lambda _, args, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    ):
        expected = model.generate(**options)
    of_stages: list[int] = []
    decode = Generator.decode
    monkeypatch.setattr(
        Generator, "decode", lambda self, given: of_stages.append(given["input_ids"].shape[1]) or decode(self, given)
    )
    pipe = Pipeline(model, num_stages)
    _ = pipe.forwards.generator  # compares a tiny clone
    of_stages.clear()
    found = pipe.generate(**options)
    assert of_stages == lengths == [6, 1, 1, 9, 1, 1, 1, 1]
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits)


def test_scores_of_the_plain_model() -> None:
    model = sharp_model("marian")
    options = {"num_beams": 2, "return_dict_in_generate": True, "output_scores": True}
    expected = model.generate(**prompts(model), max_new_tokens=10, **options)
    found = Pipeline(model, 3).generate(**prompts(model), max_new_tokens=10, **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores)
    assert cache_argument(model) in expected
    assert cache_argument(model) not in found


class _Forbid(LogitsProcessor):
    """Forbids one token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.token] = -float("inf")
        return scores


class _Collector(BaseStreamer):
    """Keeps the tokens that it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def test_processors_configurations_and_streamers_of_the_caller() -> None:
    model = sharp_model("llama")
    pipe, row = Pipeline(model, 2), {name: tensor[:1] for name, tensor in prompts(model).items()}
    common = int(plain_tokens(model)[0, -1])
    expected = model.generate(**row, max_new_tokens=6, logits_processor=[_Forbid(common)])
    assert torch.equal(pipe.generate(**row, max_new_tokens=6, logits_processor=[_Forbid(common)]), expected)
    assert common not in expected[0, 7:]
    configuration = GenerationConfig(max_new_tokens=6, num_beams=2, pad_token_id=0)
    expected = model.generate(**row, generation_config=configuration)
    assert torch.equal(pipe.generate(**row, generation_config=configuration), expected)
    streamer = _Collector()
    found = pipe.generate(**row, max_new_tokens=6, streamer=streamer)
    assert streamer.tokens == [*found[0].tolist(), -1]


def test_the_generation_configuration_comes_with_the_model_and_leaves_with_it(tmp_path: Path) -> None:
    model = plain_model(config_of("marian"), dtype=torch.float32).eval()
    model.generation_config.forced_bos_token_id = 9
    model.generation_config.max_new_tokens = 4
    model.save_pretrained(tmp_path / "plain")
    expected = model.generate(**prompts(model))
    assert expected.shape[1] == 5
    assert expected[:, 1].tolist() == [9] * 4
    for source in (model, tmp_path / "plain"):
        pipe = Pipeline(source, 2)
        assert torch.equal(pipe.generate(**prompts(model)), expected)
        pipe.save_pretrained(tmp_path / "saved")
        assert GenerationConfig.from_pretrained(tmp_path / "saved").forced_bos_token_id == 9


EXAMPLES: dict[str, Any] = {
    "assistant_early_exit": 1,
    "prompt_lookup_num_tokens": 2,
    "num_beam_groups": 2,
    "penalty_alpha": 0.6,
    "guidance_scale": 1.5,
    "cache_implementation": "static",
    "max_time": 1.0,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_a_pipeline_cannot_honour_is_refused_by_name(name: str) -> None:
    model, pipe = sharp_model("llama"), split_model("llama", 2)
    with pytest.raises(UserError, match=rf"generate\({name}=.* is not supported by a pipeline: "):
        pipe.generate(**prompts(model), **{name: EXAMPLES.get(name, True)})


def test_a_refused_value_in_a_configuration_is_refused_too() -> None:
    model = sharp_model("llama")
    with pytest.raises(UserError, match="cache_implementation='static'"):
        Pipeline(model, 2).generate(
            **prompts(model), generation_config=GenerationConfig(cache_implementation="static", max_new_tokens=2)
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_token": 3}, r"no argument 'max_new_token'; did you mean 'max_new_tokens'\?"),
        ({"input_ids": None}, "needs input_ids"),
        # Numbers that ended in a traceback, or were ignored without a word.
        ({"max_new_tokens": 0}, "max_new_tokens=0: expected a whole number of at least 1"),
        ({"num_beams": "x"}, "num_beams='x': expected a whole number of at least 1"),
        ({"do_sample": True, "temperature": 0.0}, r"temperature=0\.0: expected a finite number above 0"),
        ({"do_sample": True, "top_p": 7}, "top_p=7: expected a finite number above 0 and at most 1"),
        ({"temperature": 0.5}, r"temperature=0\.5 is of sampling, and do_sample is not set; set do_sample, or leave"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    model = sharp_model("llama")
    with pytest.raises(UserError, match=message):
        split_model("llama", 2).generate(**{**prompts(model), **arguments})


@pytest.mark.parametrize("family", ["gpt2", "bart"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_text_past_the_table_of_positions_is_an_error(family: str, use_cache: bool) -> None:
    """Up to the last position it is generated, padding of shorter rows not counted."""
    model, pipe = sharp_model(family), split_model(family, 2)
    given = prompts(model)
    most = pipe.adapter.num_positions["decoder"]
    first = 1 if model.config.is_encoder_decoder else given["input_ids"].shape[1]
    options = {"min_new_tokens": most - first + 1, "use_cache": use_cache}
    assert pipe.generate(**given, **{**options, "max_new_tokens": most - first + 1}).shape[1] == most + 1
    with pytest.raises(UserError, match=rf"a text has {most + 1} tokens .* the model has positions for {most}; use"):
        pipe.generate(**given, **{**options, "max_new_tokens": most - first + 9, "min_new_tokens": most})


def test_a_cache_that_other_stages_cannot_count_is_refused() -> None:
    """A linear-attention block keeps states without a length; guessing one would give wrong tokens."""
    pipe = Pipeline(plain_model(config_of("llama")), 2)
    num_blocks = len(pipe.adapter.stacks[-1].blocks)
    pipe.adapter.config.layer_types = ["linear_attention"] * num_blocks
    with pytest.raises(UnsupportedModelError, match="llama: block 2 keeps a LinearAttentionLayer in generation"):
        pipe.generate(**prompts(pipe.adapter.reference), max_new_tokens=2)


def test_a_failing_stage_is_named() -> None:
    model = sharp_model("marian")
    pipe = Pipeline(model, 3)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    handle = pipe.models[2].model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(StageError, match="process 0, stage 2, generation in the decoder: RuntimeError: out of luck"):
        pipe.generate(**prompts(model), max_new_tokens=10)
    handle.remove()
    assert torch.equal(pipe.generate(**prompts(model), max_new_tokens=10), plain_tokens(model))


def _with_objects() -> dict[str, Any]:
    """Arguments that are no data, with tokens that no model would choose itself."""
    config = GenerationConfig(num_beams=2, max_new_tokens=4, pad_token_id=0, decoder_start_token_id=0)
    return {"prefix_allowed_tokens_fn": lambda _, ids: [7 + len(ids)], "generation_config": config}


def _on_two_processes() -> dict[str, Any]:
    """Every method of two families on three stages; only the main process has the prompts and the right seed."""
    rank = torch.distributed.get_rank()
    results: dict[str, Any] = {}
    for family in ("llama", "marian"):
        model = sharp_model(family)
        pipe = Pipeline(model, 3)
        for method, options in METHODS.items():
            torch.manual_seed(5 if rank == 0 else 99)
            arguments = {**prompts(model), "max_new_tokens": 10, **options} if rank == 0 else {}
            results[f"{family}, {method}"] = pipe.generate(**arguments)
        results[f"{family}, own object"] = pipe.generate(**prompts(model), **_with_objects())
        for name, value in {"max_time": 1.0, "prefix_allowed_tokens_fn": lambda *_: [1]}.items():
            try:
                pipe.generate(**prompts(model), **({name: value} if rank == 0 else {}))
            except UserError as error:
                results[f"{family}, refusal of {name}"] = str(error)
    encoder_alone = Pipeline(sharp_model("marian"), 2, partition=[3, 4])
    results["encoder alone"] = encoder_alone.generate(**prompts(sharp_model("marian")), max_new_tokens=10)
    return {**results, "trained": _tokens_after_a_step()}


def _tokens_after_a_step() -> torch.Tensor:
    """The copy of a tied embedding must have its owner's new value."""
    plain = plain_model(tiny_config("m2m_100", tied=True))
    pipe = Pipeline(plain, 2)
    pipe.train_step(padded_batch(plain.config))
    torch.optim.SGD(pipe.parameters(), lr=5.0).step()
    return pipe.generate(**prompts(plain), max_new_tokens=10)


def test_two_gloo_processes() -> None:
    expected = {
        f"{family}, {method}": plain_tokens(sharp_model(family), **options)
        for family in ("llama", "marian")
        for method, options in METHODS.items()
    }
    expected["encoder alone"] = plain_tokens(sharp_model("marian"))
    plain = plain_model(tiny_config("m2m_100", tied=True))
    before = plain_tokens(plain.eval())
    run_plain(plain.train(), padded_batch(plain.config), 1)
    torch.optim.SGD(plain.parameters(), lr=5.0).step()
    expected["trained"] = plain_tokens(plain.eval())
    assert not torch.equal(expected["trained"], before)
    for results in run_gloo(_on_two_processes, 2):
        for family in ("llama", "marian"):
            assert "generate(max_time=1.0) is not supported" in results[f"{family}, refusal of max_time"]
            refusal = results[f"{family}, refusal of prefix_allowed_tokens_fn"]
            assert "object of builtins.function, which cannot be sent to other" in refusal
            assert "process 1 was given none; give it on every process" in refusal
            expected[f"{family}, own object"] = sharp_model(family).generate(
                **prompts(sharp_model(family)), **_with_objects()
            )
        for name, tokens in expected.items():
            assert torch.equal(results[name], tokens), name


#: Ends that rows of one half reach, and those of the other do not, or later.
ENDS: dict[str, dict[str, Any]] = {
    "llama": {"eos_token_id": [4, 5]},
    "llama, beams": {"eos_token_id": [3, 41], "num_beams": 3, "num_return_sequences": 2},
    "marian": {"eos_token_id": [3, 5]},
}
#: K and replicas on four processes -> for each process its rows of four.
MESHES: dict[tuple[int, int | tuple[int, ...]], list[int]] = {
    (2, 2): [2, 2, 2, 2],
    (1, 4): [1, 1, 1, 1],
    (2, (1, 3)): [4, 4, 4, 4],
    (3, (2, 1, 1)): [4, 4, 4, 4],
}


def _on_replicas() -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    results: dict[str, Any] = {}
    for (num_stages, replicas), rows in MESHES.items():
        for family in ("llama", "marian") if num_stages == 2 and replicas == 2 else ("llama",):
            model = sharp_model(family)
            pipe = Pipeline(model, num_stages, 4, replicas=replicas)
            found: list[int] = []
            decode = pipe.forwards.generator.decode

            def noted(inputs: dict[str, Any], decode: Any = decode, found: list[int] = found) -> Any:
                ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
                found.append(len(ids))
                return decode(inputs)

            pipe.forwards.generator.decode = noted  # type: ignore[method-assign]
            # On the other meshes with the two whose rows are counted.
            methods = METHODS if num_stages == replicas else {name: METHODS[name] for name in ("greedy", "sampling")}
            named = methods | {name: options for name, options in ENDS.items() if name.startswith(family)}
            for method, options in named.items():
                torch.manual_seed(5 if rank == 0 else 99)
                arguments = {**prompts(model), "max_new_tokens": 10, **options} if rank == 0 else {}
                found.clear()
                results[f"{num_stages} {replicas} {family} {method}"] = pipe.generate(**arguments)
                if method in ("greedy", "sampling"):
                    assert found[0] == (rows[rank] if method == "greedy" else 8)
    return results


def test_replicas_generate_different_rows_and_the_plain_models_tokens() -> None:
    everyone = run_gloo(_on_replicas, 4)
    expected = {
        f"{family} {method}": plain_tokens(sharp_model(family), **options)
        for family in ("llama", "marian")
        for method, options in (METHODS | ENDS).items()
        if method not in ENDS or method.startswith(family)
    }
    for results in everyone:
        for name, tokens in results.items():
            assert torch.equal(tokens, expected[re.sub(r"^.*?(?=llama|marian)", "", name)]), name


def test_the_pipelines_of_replicas() -> None:
    assert pipelines(Placement(((0, 1), (2, 3, 4)))) == ((0, 2), (1, 3))
    assert pipelines(Placement(((0, 2), (1, 3), (0, 2), (1, 3)))) == ((0, 1), (2, 3))
    # A process would have to be in two.
    assert pipelines(Placement(((0, 1), (1, 0)))) == ((0, 1),)
