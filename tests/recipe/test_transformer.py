"""T(L, H, A): what parses, which fields it decides, and what contradicts it."""

from __future__ import annotations

from typing import Any

import pytest

from hf_gpipe.errors import RecipeError
from hf_gpipe.recipe import parse_recipe
from hf_gpipe.recipe.transformer import FAMILIES, TransformerSize, with_transformer

RECIPE = """\
model: {transformer: "T(6, 8192, 16)", config: {model_type: t5, d_model: 1024}}
data: {kind: cldr, languages: [de]}
training: {output_dir: out}
"""


@pytest.mark.parametrize("text", ["T(6, 8192, 16)", "T(6,8192,16)", "  T ( 6 , 8192 , 16 ) "])
def test_a_size(text: str) -> None:
    assert TransformerSize.parse(text) == TransformerSize(6, 8192, 16)
    assert str(TransformerSize.parse(text)) == "T(6, 8192, 16)"


@pytest.mark.parametrize(
    "text",
    [
        *("T(6, 8192)", "T(6, 8192, 16, 2)", "T(0, 8192, 16)", "T(6, -1, 16)", "T(6, 8k, 16)", "t(6, 8192, 16)", "6"),
        *("T(6.0, 8192, 16)", "T(6, 8192, 16", "xT(6, 8192, 16)", "T(6, 8192, 16) M"),
    ],
)
def test_no_size(text: str) -> None:
    with pytest.raises(RecipeError, match=r"model\.transformer is .* must be T\(L, H, A\).*T\(6, 8192, 16\)"):
        TransformerSize.parse(text)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fields_of_a_size(family: str) -> None:
    fields = with_transformer({"model_type": family, "d_model": 1024}, "T(24, 8192, 16)")
    assert fields == {
        **{"model_type": family, "d_model": 1024, "num_layers": 24, "num_decoder_layers": 24, "d_ff": 8192},
        **{"num_heads": 16, "d_kv": 64, "feed_forward_proj": "relu"},
    }


@pytest.mark.parametrize("given", [{"d_kv": 16}, {"head_dim": 16}, {"feed_forward_proj": "gated-gelu"}])
def test_the_width_of_heads_and_the_activation_may_be_given(given: dict[str, Any]) -> None:
    fields = with_transformer({"model_type": "t5", **given}, "T(2, 64, 4)")
    assert fields.items() >= given.items()
    assert ("d_kv" in fields) != ("head_dim" in given), "one name of a field, not two"


@pytest.mark.parametrize("field", ["num_layers", "num_decoder_layers", "d_ff", "num_heads", "num_hidden_layers"])
def test_a_field_in_both_places(field: str) -> None:
    message = rf"model\.config\.{field} is 6 and model\.transformer is T\(6, 6, 6\), which sets it to 6; leave one"
    with pytest.raises(RecipeError, match=message):
        with_transformer({"model_type": "t5", field: 6}, "T(6, 6, 6)")


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("marian", "heads are d_model / heads wide"),
        ("m2m_100", "heads are d_model / heads wide"),
        ("bart", "heads are d_model / heads wide"),
        ("switch_transformers", "mixtures of experts"),
        ("longt5", "within a window"),
        ("llama", "not known to be an encoder-decoder that sets its head width separately"),
    ],
)
def test_families_that_cannot_have_it(family: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=rf"the family {family} cannot have it: .*{reason}.*model_type t5"):
        with_transformer({"model_type": family}, "T(6, 8192, 16)")


def test_a_recipe_with_a_size() -> None:
    recipe = parse_recipe(RECIPE)
    assert recipe.model.transformer == "T(6, 8192, 16)"
    assert parse_recipe(recipe.to_yaml()) == recipe


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.transformer=T(6, 8192)", r"model\.transformer is 'T\(6, 8192\)'"),
        ("model.transformer=6", r"model\.transformer: found 6 \(a whole number\)"),
        ("model.config.num_layers=6", r"model\.config\.num_layers is 6 and transformer is T\(6, 8192, 16\)"),
        ("model.config.model_type=marian", "the family marian cannot have it"),
        ("model.path=some/model", r"model\.transformer is 'T\(6, 8192, 16\)' .* and path is 'some/model'"),
        ("training.logit_clipping=0", r"training\.logit_clipping: found 0 .*above 0"),
        ("training.logit_clipping=.inf", r"training\.logit_clipping: found inf"),
    ],
)
def test_what_a_recipe_gets_wrong(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe(RECIPE, [override])


def test_only_new_models_start_with_smaller_feed_forward_layers() -> None:
    overrides = ["model.path=some/model", "model.transformer=null", "model.depth_scaled_feed_forward=true"]
    with pytest.raises(RecipeError, match=r"depth_scaled_feed_forward is true .* and path is 'some/model'"):
        parse_recipe(RECIPE, overrides)
    assert parse_recipe(RECIPE, overrides[2:]).model.depth_scaled_feed_forward
