"""The families whose split is known to be exact, and those that are not supported, with the reason.

`python scripts/families.py --check` verifies both lists with the installed transformers; docs/families.md is its
report. A family in neither list is compared with the plain model before a pipeline of it is made, and so is a
configuration that runs other code than its family's default one (structure.py), and every family on versions of the
libraries that were not verified (`libraries/verified.py`).
"""

from __future__ import annotations

#: Values of `model_type` in the configurations.
EXACT = frozenset(
    {
        *("afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "aya_vision"),
        *("bailing_hybrid", "bamba", "bart", "beam", "bert", "bert-generation", "biogpt", "bitnet", "blenderbot"),
        *("blenderbot-small", "bloom"),
        *("camembert", "codegen", "cohere", "cohere2", "cohere2_moe", "cohere2_vision", "cwm"),
        *("data2vec-text", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_vl", "diffllama"),
        *("doge", "dots1", "dots3_note_text"),
        *("electra", "emu3", "ernie", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone4_5", "exaone_moe"),
        *("falcon", "falcon_h1", "falcon_mamba", "flex_olmo", "flint", "fuyu"),
        *("gemma", "gemma2", "gemma3", "gemma3_text", "gemma4_unified", "gemma4_unified_text", "git", "glm", "glm4"),
        *("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "got_ocr2", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo"),
        *("gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe"),
        *("granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
        *("helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax"),
        *("idefics2", "idefics3", "inkling_text", "internlm3", "internvl", "iquestcoder"),
        *("jais2", "jamba", "janus", "jetmoe"),
        *("kimi_linear", "kolibri1"),
        *("laguna", "lfm2", "lfm2_moe", "lfm3", "llama", "llama4", "llama4_text", "llava", "longcat_flash", "longt5"),
        *("m2m_100", "mamba", "mamba2", "marian", "mbart", "megatron-bert", "mellum", "mimo_v2_flash", "minicpm3"),
        *("minimax", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral"),
        *("modernbert-decoder", "moshi", "moss_transcribe_diarize", "mpt", "mt5", "mvp"),
        *("nanochat", "nemotron", "nemotron_h", "nllb-moe"),
        *("olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt"),
        *("paligemma", "pegasus", "persimmon", "phi", "phi3", "phi4_multimodal", "phimoe", "plbart"),
        *("qwen2", "qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("qwen3_5_text", "qwen3_moe", "qwen3_next"),
        *("recurrent_gemma", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "rwkv"),
        *("seamless_m4t", "seamless_m4t_v2", "seed_oss", "smollm3", "smolvlm", "solar_open", "stablelm"),
        *("starcoder2", "switch_transformers"),
        *("t5", "t5gemma", "t5gemma2"),
        *("umt5",),
        *("vaultgemma", "vipllava"),
        *("xglm", "xlm-roberta", "xlm-roberta-xl", "xlstm"),
        *("youtu",),
    }
)

REFUSED = {
    "big_bird": "all its blocks change their type of attention with the length of the batch",
    "bigbird_pegasus": "all its blocks change their type of attention with the length of the batch",
    "cpmant": "it puts prompts of its own before the ids, so that hidden states are longer than the ids",
    "ctrl": "it scales the embeddings in place",
    "encoder-decoder": "it masks the decoder's inputs only if it makes them itself, from labels",
    "hrm_text": "its blocks run several times in a forward",
    "hy_v4": "some of its blocks attend to tokens that earlier blocks have chosen",
    "inkling2_text": "its forward reads the type of attention from every block, also from blocks of other stages",
    "led": "it embeds a second input, its padding, in the middle of a forward",
    "mllama": "it skips blocks if there is no image",
    "openai-gpt": "every stage would need a weight of a block to choose the type of its mask",
    "pegasus_x": "it lengthens hidden states to a multiple of its block size",
    "roformer": "its blocks share a table of positions in a form that is not supported",
    "trocr": "its own loss does not shift the labels: each position is to predict its own label, not the next token",
    "xlm": "its blocks are not modules",
    "xlnet": "it has weights outside of any layer (mask_emb)",
    "zamba": "some of its blocks share weights and read the embeddings again",
    "zamba2": "some of its blocks share weights and read the embeddings again",
    "zaya": "it has weights outside of any layer (input_hidden_states_scale)",
}

_OF_SEVERAL_SIZES = "its images have different numbers of tokens, which follow from image_sizes"
_DEEP = "features of the tower enter several blocks"
_OF_TIMM = "its tower needs timm, which was not installed for the comparison"
_OF_OWN_FORM = "its image entries have a form that is not supported"
_FAILS = "a tiny clone of the plain model fails with images"
#: Why the images of a family are not read (image_text.py has the others); other families were not compared.
UNREAD = {
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision", "mistral3"), _OF_SEVERAL_SIZES),
    **dict.fromkeys(("glm4v", "glm46v", "glm_ocr"), _FAILS),
    "lighton_ocr": _OF_SEVERAL_SIZES,
    **dict.fromkeys(("granite_docling", "paddleocr_vl", "video_llama_3"), _OF_OWN_FORM),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), _DEEP),
    **dict.fromkeys(("fast_vlm", "perception_lm"), _OF_TIMM),
    **dict.fromkeys(("idefics", "mllama"), "its blocks attend to images"),
    "ovis2": "the tower also makes the features of tokens around an image",
}
