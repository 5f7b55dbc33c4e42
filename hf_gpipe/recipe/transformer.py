"""T(L, H, A): the size of a Transformer, in the notation of GPipe's translation experiments.

L encoder and L decoder layers, feed-forward layers of width H, and A attention heads of width 64 (arXiv 1811.06965,
section 5). The width of attention is 64 A whatever the width of the model is, so the notation needs a family that
configures the width of a head separately.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hf_gpipe.errors import RecipeError

HEAD_WIDTH = 64

FAMILIES = ("t5", "mt5", "umt5")
"""Families whose configuration has all fields of T(L, H, A)."""

_TIED = (
    *("bart", "blenderbot", "blenderbot-small", "bigbird_pegasus", "led", "m2m_100", "marian", "mbart", "mvp"),
    *("nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet", "fsmt"),
)
#: Family -> why it has no T(L, H, A).
_REASONS = {
    **dict.fromkeys(_TIED, f"its heads are d_model / heads wide and cannot be {HEAD_WIDTH} wide at every d_model"),
    "switch_transformers": "its feed-forward layers are mixtures of experts",
    "longt5": "its encoder attends within a window",
}

_PATTERN = re.compile(r"\s*T\s*\(\s*([0-9]+)\s*,\s*([0-9]+)\s*,\s*([0-9]+)\s*\)\s*")


@dataclass(frozen=True)
class TransformerSize:
    """T(L, H, A).

    Attributes:
        num_layers: L, the layers of the encoder, and of the decoder.
        feed_forward_width: H.
        num_heads: A, each 64 wide.
    """

    num_layers: int
    feed_forward_width: int
    num_heads: int

    @classmethod
    def parse(cls, text: str, name: str = "model.transformer") -> TransformerSize:
        """Parse text such as "T(6, 8192, 16)"; `name` is the key that has it, for messages.

        Raises RecipeError unless it has three whole numbers of at least 1.
        """
        match = _PATTERN.fullmatch(text)
        sizes = [int(number) for number in match.groups()] if match else []
        if not sizes or min(sizes) < 1:
            raise RecipeError(
                f"{name} is {text!r}; it must be T(L, H, A) with three whole numbers of at least 1: encoder (and "
                "decoder) layers, feed-forward width, attention heads; for example T(6, 8192, 16)."
            )
        return cls(*sizes)

    def __str__(self) -> str:
        return f"T({self.num_layers}, {self.feed_forward_width}, {self.num_heads})"

    @property
    def fields(self) -> dict[str, int]:
        """The fields of the family's configuration that L, H and A set."""
        return {
            "num_layers": self.num_layers,
            "num_decoder_layers": self.num_layers,
            "d_ff": self.feed_forward_width,
            "num_heads": self.num_heads,
        }


#: Defaults that go with T(L, H, A): the width of heads, and the paper's feed-forward layer, which is two matrices
#: around a ReLU. mt5 and umt5 would have three matrices.
_COMPANIONS = {"d_kv": HEAD_WIDTH, "feed_forward_proj": "relu"}

#: Other names of the same fields, as T5's configuration reads them.
_ALIASES = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "head_dim": "d_kv"}


def with_transformer(
    config: dict[str, Any], transformer: str, name: str = "model.transformer", prefix: str = "model.config."
) -> dict[str, Any]:
    """Return the fields of a configuration with those of a T(L, H, A) added.

    Args:
        config: `model_type`, one of FAMILIES, and further fields; `d_kv` and `feed_forward_proj` may be among them,
            to replace 64 and relu.
        transformer: the text, such as "T(6, 8192, 16)".
        name: the key that has the text, for messages.
        prefix: the prefix of a field's name in messages.

    Raises:
        RecipeError: text that is not T(L, H, A), a family that does not support it, or a field that it sets already.
    """
    size = TransformerSize.parse(transformer, name)
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        reason = _REASONS.get(family, "it is not known to be an encoder-decoder that sets its head width separately")
        raise RecipeError(
            f"{name} is {size}, and the family {family} cannot have it: {reason}. Use {prefix}model_type t5 (or "
            f"{', '.join(FAMILIES[1:])}), or leave {name} out and give the fields of {family} themselves."
        )
    canonical = {given: _ALIASES.get(given, given) for given in config}
    for given, field in canonical.items():
        if field in size.fields:
            raise RecipeError(
                f"{prefix}{given} is {config[given]!r} and {name} is {size}, which sets it to {size.fields[field]}; "
                "leave one of them out."
            )
    companions = {field: value for field, value in _COMPANIONS.items() if field not in canonical.values()}
    return {**config, **size.fields, **companions}
