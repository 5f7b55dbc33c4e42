"""Tiny clones of configurations: the same architecture and options, with sizes that run in milliseconds.

Clones are used to observe a family's forward (probe.py) and to compare a split model with the plain one before a long
run (`hf-gpipe check`). Only sizes change. What decides the computation stays: ties, scales, activation
functions, types of layers and of positions, experts and their routing.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from hf_gpipe.adapters.observation.length_limit import limit_field, rotary_parts

NUM_BLOCKS = 4
#: The limit of rotary embeddings that depend on the length of rows; the rows of clones have 6 to 11 tokens.
LENGTH_LIMIT = 7
VOCABULARY = 64
WIDTH, HEADS, HEAD_WIDTH = 32, 4, 8


def _names(size: int, *names: str) -> dict[str, int]:
    return dict.fromkeys(names, size)


#: Fields of configurations that say how many blocks a stack has.
BLOCK_COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
    *("encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers"),
)
_WIDTHS = _names(
    WIDTH,
    *("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "embedding_size"),
    *("attention_hidden_size", "lru_width", "pooler_hidden_size"),
)
_HEADS = _names(
    HEADS,
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "swa_num_attention_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
    *("num_encoder_attention_heads", "num_decoder_attention_heads"),
    *("mamba_n_heads", "linear_num_heads", "linear_num_value_heads"),
)
_HEAD_WIDTHS = _names(
    HEAD_WIDTH,
    *("head_dim", "d_kv", "v_head_dim", "swa_head_dim", "global_head_dim", "kv_channels", "qk_head_dim"),
    *("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim", "index_head_dim", "mamba_head_dim"),
    "query_pre_attn_scalar",
)
_FEED_FORWARD = _names(
    2 * WIDTH,
    *("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"),
    *("shared_expert_intermediate_size", "shared_intermediate_size", "intermediate_size_mlp"),
    *("alignment_intermediate_size", "mlp_dim"),
)
_EXPERTS = _names(4, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_VOCABULARIES = _names(
    VOCABULARY,
    *("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "encoder_hash_byte_group_vocab"),
    *("shape_vocab_size", "pronunciation_vocab_size"),
)
_POSITIONS = _names(64, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
#: Windows, chunks, ranks of factors, states and parts of heads.
_OTHER = {
    "first_k_dense_replace": 1,
    **_names(2, "linear_num_key_heads", "index_n_heads"),
    **_names(4, "sliding_window", "window_size", "chunk_size", "block_size", "mamba_chunk_size", "index_topk"),
    **_names(4, "qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "mamba_dt_rank", "time_step_rank"),
    **_names(8, "hidden_size_per_layer_input", "kv_lora_rank", "mamba_d_state", "state_size"),
    **_names(16, "q_lora_rank", "mamba_d_head", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
    **_names(16, "pronunciation_embed_dim", "shape_embed_dim"),
}
_SIZES: dict[str, int] = {
    **_names(NUM_BLOCKS, *BLOCK_COUNTS),
    **_WIDTHS,
    **_HEADS,
    **_HEAD_WIDTHS,
    **_FEED_FORWARD,
    **_EXPERTS,
    **_VOCABULARIES,
    **_POSITIONS,
    **_OTHER,
}
_GROUPED = ("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads")
_AT_MOST = {
    **_names(HEADS, *_GROUPED),
    **_names(2, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "num_kv_shared_layers"),
    **_names(1, "n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_dense_layers"),
}
#: Lists that transformers derives from other values when they are not given.
DERIVED = ("layer_types", "mlp_layer_types", "attention_layers", "sparse_layers", "per_layer_config")
#: Sizes of a family that must fit each other, which the tables above do not know.
_FAMILIES: dict[str, dict[str, Any]] = {
    "zamba": {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * WIDTH // HEADS},
    "zamba2": {
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 2 * WIDTH // HEADS,
        "mamba_headdim": HEAD_WIDTH,
        "adapter_rank": 4,
        "n_mamba_heads": 2 * WIDTH // HEAD_WIDTH,
        "mamba_ngroups": 1,
        "hybrid_layer_ids": [1, 3],
    },
    "xlstm": {"embedding_dim": WIDTH, "num_blocks": NUM_BLOCKS},
    "falcon_h1": {"mamba_d_ssm": 2 * WIDTH, "mamba_n_heads": HEADS, "mamba_d_head": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], NUM_BLOCKS // 2]]},
    "mamba2": {"num_heads": 2 * WIDTH // HEAD_WIDTH},
    "xlnet": {"d_head": HEAD_WIDTH},
    # Its groups of channels are 32.
    "janus_vqgan": {
        "base_channels": 32,
        "channel_multiplier": [1, 2],
        "latent_channels": 32,
        "num_embeddings": VOCABULARY,
        "image_token_embed_dim": WIDTH,
        "projection_dim": WIDTH,
    },
}
#: Sizes of the part that reads images, and of what the text part reads of them.
_IMAGES: dict[str, Any] = {
    **{"image_size": 16, "patch_size": 4, "depth": NUM_BLOCKS, "embed_dim": WIDTH, "out_hidden_size": WIDTH},
    **{"projection_dim": WIDTH, "mm_tokens_per_image": 4, "image_seq_length": 4, "window_size": 16},
    "fullatt_block_indexes": [1, 3],
}
#: Families whose positions have three parts, which a default configuration does not size.
_OF_THREE_POSITIONS = ("qwen2_vl_text", "qwen2_5_vl_text")
#: The last token of the vocabulary, which no row of text has.
IMAGE_TOKEN = VOCABULARY - 1
_IMAGE_TOKENS = ("image_token_id", "image_token_index")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}


def tiny_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration of the same class with small sizes; `config` is not changed."""
    values = _shrink(config.to_diff_dict() | {"model_type": config.model_type}, config)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        values["decoder_start_token_id"] = _TOKENS["decoder_start_token_id"]
    if getattr(config, "pad_token_id", None) is None:
        values["pad_token_id"] = _TOKENS["pad_token_id"]
    tiny = type(config).from_dict(values)
    if by_block := tiny.to_dict().get("per_layer_config"):
        # Some families give some of their blocks other sizes.
        sizes = _SIZES | {"num_key_value_heads": HEADS}
        values["per_layer_config"] = {
            block: {name: sizes.get(name, value) if _is_size(value) else value for name, value in entries.items()}
            for block, entries in by_block.items()
        }
        tiny = type(config).from_dict(values)
    return tiny


def _shrink(values: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """Return the values of a configuration, and of the configurations in it, with small sizes."""
    full = config.to_dict()
    shrunk = {name: value for name, value in values.items() if name not in DERIVED}
    num_blocks = next((full[name] for name in BLOCK_COUNTS if _is_size(full.get(name))), None)
    names = {config.attribute_map.get(name, name): size for name, size in _SIZES.items()}
    for name, size in names.items():
        if _is_size(full.get(name)) and full[name] != 0:  # 0 turns something off
            shrunk[name] = size
    for name in ("word_embed_proj_dim", "embedding_size"):
        if _is_size(full.get(name)) and full[name] != config.hidden_size:
            shrunk[name] = WIDTH // 2
    if _is_size(full.get("head_dim")) and full["head_dim"] == full.get("qk_rope_head_dim"):
        shrunk["head_dim"] = _SIZES["qk_rope_head_dim"]
    for name, limit in _AT_MOST.items():
        if _is_size(full.get(name)):
            shrunk[name] = _fewer_key_value_heads(full, name) if name in _GROUPED else min(full[name], limit)
    for name, token in _TOKENS.items():
        if (_is_size(full.get(name)) and full[name] >= VOCABULARY) or isinstance(full.get(name), list):
            shrunk[name] = token
    for name, value in full.items():
        sub_config = getattr(config, name, None) if isinstance(value, dict) else None
        if isinstance(sub_config, PreTrainedConfig):
            shrunk[name] = _shrink(value, sub_config)
        elif isinstance(value, list) and len(value) == num_blocks:  # one entry per block
            each = names.get(name.removesuffix("_per_layer"))  # as of `num_attention_heads_per_layer`
            shrunk[name] = _spread(value, NUM_BLOCKS) if each is None else [each] * NUM_BLOCKS
    if isinstance(full.get("vision_config"), dict):
        _shrink_images(shrunk, full)
    _shrink_rotary(shrunk, full, config)
    return shrunk | _FAMILIES.get(config.model_type, {})


def _shrink_rotary(shrunk: dict[str, Any], full: dict[str, Any], config: PreTrainedConfig) -> None:
    """Give rotary embeddings the small sizes, and a limit that some rows of a clone pass where they depend on one."""
    rope = full.get("rope_parameters") or {}
    width = shrunk.get("head_dim") or full.get("head_dim") or WIDTH // HEADS
    parts = []
    for part in rotary_parts(rope):
        parts.append(dict(part))
        if "mrope_section" in part or config.model_type in _OF_THREE_POSITIONS:
            parts[-1]["mrope_section"] = [HEAD_WIDTH // 2 - 2, 1, 1]
        for name in ("short_factor", "long_factor"):
            if isinstance(factors := part.get(name), list) and factors:
                count = len(range(0, int(width * part.get("partial_rotary_factor", 1.0)), 2))
                parts[-1][name] = [factors[i * len(factors) // count] for i in range(count)]
        if (field := limit_field(part)) is not None:
            field = config.attribute_map.get(field, field)
            for values, given in ((parts[-1], part), (shrunk, full)):
                if given.get(field) is not None:
                    values[field] = LENGTH_LIMIT
    if rope:
        nested = [name for name, value in rope.items() if isinstance(value, dict)]
        shrunk["rope_parameters"] = rope | dict(zip(nested, parts, strict=True)) if nested else parts[0]


def _shrink_images(shrunk: dict[str, Any], full: dict[str, Any]) -> None:
    """Give the values of a model of images and text, and of its vision tower, small images."""
    for values, given in ((shrunk, full), (shrunk["vision_config"], full["vision_config"])):
        for name, size in _IMAGES.items():
            if (value := given.get(name)) is not None:
                is_pair = isinstance(value, list) and not isinstance(size, list)
                values[name] = [size] * len(value) if is_pair else size
    for name in _IMAGE_TOKENS:
        if _is_size(full.get(name)):
            shrunk[name] = IMAGE_TOKEN
    for name in ("vision_feature_layer", "vision_feature_layers"):  # the second in transformers 5.17's vipllava
        if (layers := full.get(name)) is not None:
            # The numbers of hidden states of the tiny tower, which has one more of them than blocks.
            numbers = layers if isinstance(layers, list) else [layers]
            within = [max(-NUM_BLOCKS - 1, min(NUM_BLOCKS, number)) for number in numbers]
            shrunk[name] = within if isinstance(layers, list) else within[0]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _fewer_key_value_heads(values: dict[str, Any], name: str) -> int:
    """A small number of key-value heads that keeps multi-head, grouped-query or multi-query attention as it is."""
    heads = values.get("num_attention_heads") or values.get("n_head") or HEADS
    if values[name] == 1:
        return 1
    return HEADS if values[name] >= heads else HEADS // 2


def _spread(kinds: list[Any], count: int) -> list[Any]:
    """`count` entries that cycle through the distinct entries of `kinds`, in the order of their first appearance."""
    distinct = [kind for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    if not distinct:
        return []
    return [distinct[i % len(distinct)] for i in range(count)]
