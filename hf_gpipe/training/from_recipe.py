"""From a recipe to its corpus, its tokenizer, the model's configuration and the trainer's arguments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.chain import as_image_classifier
from hf_gpipe.adapters.classifiers import ONE_CLASS, as_classifier, change
from hf_gpipe.adapters.embedders import as_embedder
from hf_gpipe.adapters.guards import check_sizes
from hf_gpipe.adapters.image_text import FORMS, UNREAD, images_of_row
from hf_gpipe.adapters.peft import need_peft
from hf_gpipe.adapters.quantised import need_bitsandbytes
from hf_gpipe.adapters.token_classifiers import as_token_classifier
from hf_gpipe.checkpoint.configuration import read_config
from hf_gpipe.checkpoint.peft import has_adapters
from hf_gpipe.data import Corpus, StreamedCorpus
from hf_gpipe.data.chats import ChatCorpus
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.files import read_template
from hf_gpipe.data.image_text import blank_row, read_processor
from hf_gpipe.data.images import image_processor, shape_read
from hf_gpipe.data.text import TextCorpus
from hf_gpipe.data.tokenizer import has_tokenizer, read_tokenizer, trained_tokenizer
from hf_gpipe.errors import CheckpointError, DataError, RecipeError, UnsupportedModelError, UserError, nearest
from hf_gpipe.model.opening import adapter_of, chain_of, open_chain
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.partition import partition as cut
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe import ROW_LENGTH_KINDS, SEQUENCE_KINDS, Recipe
from hf_gpipe.recipe.data import CLASSIFIER_KINDS, OF_TEXT
from hf_gpipe.recipe.transformer import with_transformer
from hf_gpipe.runtime.distillation import DistillationLoss
from hf_gpipe.runtime.loss import Loss, TokenLoss
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.embedding_loss import EmbeddingLoss
from hf_gpipe.training.grpo_loss import GRPOLoss
from hf_gpipe.training.kto_loss import KTOLoss
from hf_gpipe.training.preference_loss import PreferenceLoss
from hf_gpipe.training.reward_loss import RewardLoss

AnyCorpus = Corpus | StreamedCorpus | TextCorpus | ChatCorpus

#: Families whose decoder starts with the padding token; the others' start with the end-of-sequence token.
_STARTS_WITH_PADDING = ("marian", "pegasus", "t5", "mt5", "umt5")
#: Fields of a configuration that name a token.
_TOKENS = ("pad_token_id", "eos_token_id", "bos_token_id", "forced_eos_token_id", "decoder_start_token_id")
#: Of these, the recipe's to choose: which token a decoder starts with, and whether one is forced at the end.
_FREE_TOKENS = ("forced_eos_token_id", "decoder_start_token_id")


#: peft's names of what is not generation.
_TASK_TYPES = {
    **dict.fromkeys(CLASSIFIER_KINDS, "SEQ_CLS"),
    "process_rewards": "TOKEN_CLS",
    "embeddings": "FEATURE_EXTRACTION",
    "images": None,
}


def check_model(recipe: Recipe) -> None:
    """Raise UserError where the recipe's model cannot be made, or not be cut as the recipe says. Makes no weights."""
    key = "r" if recipe.lora.path is None else "path"
    if recipe.lora.is_on and recipe.model.path is None:
        raise RecipeError(
            f"lora.{key} is {getattr(recipe.lora, key)} and model.path is null: adapters alone are saved, so the "
            f"weights of a new model would be lost; give model.path, or leave lora.{key} out"
        )
    adapter = checked_adapter(recipe)
    pipeline = recipe.pipeline
    if isinstance(pipeline.num_stages, int):
        # By cost the planner cuts; whether there are enough layers is seen by any cut.
        strategy = "count" if pipeline.is_cut_by_cost else pipeline.partition
        cut(len(adapter.layers), pipeline.num_stages, strategy, divides_head=pipeline.divides_head)


def checked_adapter(recipe: Recipe, device: torch.device | None = None) -> Adapter:
    """The adapter of the recipe's model, by its configuration alone.

    Args:
        recipe: its model and data.
        device: where autocast is observed; None: without autocast.

    Raises:
        UserError: the model cannot be made, or cannot learn the data.
    """
    config, data = model_config(recipe, None), recipe.data
    if data.kind in SEQUENCE_KINDS and config.is_encoder_decoder:
        raise RecipeError(
            f"data.kind is {data.kind}, which a decoder-only model learns, and {config.model_type} is an "
            "encoder-decoder; choose a model such as llama, or data of pairs"
        )
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        # A run takes it from the tokenizer. Any token will do here.
        config.decoder_start_token_id = 0
    if data.kind == "image_text":
        workload_of(recipe, config)  # raises its errors before the data are read
    spec = replace(spec_of(recipe, config), model=config, config_overrides=None)
    try:
        if (chain := chain_of(spec)) is not None:
            return open_chain(spec, chain, workload_of(recipe, config).shapes)
        adapter = adapter_of(spec, device)
    except UserError:
        raise
    except Exception as error:  # whatever the family's own constructor says of its configuration
        raise RecipeError(f"model: transformers cannot make a {config.model_type} model of this: {error}") from error
    if adapter.quantisation is not None and adapter.peft is None:
        raise RecipeError(
            f"the weights at model.path {recipe.model.path!r} are quantised, and such weights are not trained; set "
            "lora.r, such as 16, or use the unquantised checkpoint"
        )
    key, what = ("max_length", "a row") if data.kind in ROW_LENGTH_KINDS else ("max_target_tokens", "a block of text")
    longest, most = getattr(data, key), adapter.num_positions.get("decoder")
    if data.kind in SEQUENCE_KINDS and most is not None and longest > most:
        raise RecipeError(
            f"data.{key} is {longest}, the length of {what}, and the model has positions for {most}; use {most} or "
            "fewer, or a model with more positions"
        )
    loss_of(recipe).check_model(adapter)
    return adapter


def tokenizer_of(recipe: Recipe, corpus: AnyCorpus, checkpoint: Path | None) -> PreTrainedTokenizerBase:
    """The tokenizer: a resumed run's own, the one that the recipe names, or one trained on the corpus."""
    tokenizer = _tokenizer(recipe, corpus, checkpoint)
    if recipe.data.chat_template is not None:
        tokenizer.chat_template = read_template(recipe.data.chat_template)
    return tokenizer


def _tokenizer(recipe: Recipe, corpus: AnyCorpus, checkpoint: Path | None) -> PreTrainedTokenizerBase:
    source = checkpoint or recipe.tokenizer.path or recipe.model.path
    if source is not None:
        try:
            return read_tokenizer(source, trust_remote_code=recipe.model.trust_remote_code)
        except DataError:
            # A directory with weights alone has no tokenizer: one is trained.
            is_expected = checkpoint is not None or recipe.tokenizer.path is not None
            if is_expected or has_tokenizer(source):
                raise
    return trained_tokenizer(corpus, recipe.tokenizer)


def processor_of(recipe: Recipe, checkpoint: Path | None = None) -> Any:
    """The image processor: a resumed run's own, that of `model.path`, or the default one of the model's family."""
    size = recipe.data.image_size if checkpoint is None else None
    return image_processor(checkpoint or recipe.model.path, model_config(recipe, None), size)


def image_text_processor_of(recipe: Recipe, checkpoint: Path | None = None) -> Any:
    """The processor of images and text: a resumed run's own, or that of `model.path`."""
    assert recipe.model.path is not None, "it was checked"
    return read_processor(checkpoint or recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)


def _workload_with_images(recipe: Recipe, config: PreTrainedConfig) -> Workload:
    data = recipe.data
    if config.model_type not in FORMS:
        reason = UNREAD.get(config.model_type, "no one has compared them with the plain model's")
        raise UnsupportedModelError(
            f"data.kind is image_text, and images of the family {config.model_type} are not read: {reason}; choose "
            f"another, such as {', '.join(sorted(FORMS)[:4])}"
        )
    images = images_of_row(config, blank_row(image_text_processor_of(recipe), data.images_per_row))
    if (most := images.places[-1] + 1) > data.max_length:
        raise RecipeError(
            f"data.max_length is {data.max_length}, and data.images_per_row {data.images_per_row} take {most} tokens; "
            "raise max_length"
        )
    return replace(Workload.of_recipe(recipe, 1, is_encoder_decoder=False), row_images=images)


def workload_of(recipe: Recipe, config: PreTrainedConfig) -> Workload:
    """The shape of the recipe's longest mini-batch, for a model of this configuration."""
    if recipe.data.kind == "image_text":
        return _workload_with_images(recipe, config)
    if recipe.data.kind != "images":
        return Workload.of_recipe(recipe, 1, is_encoder_decoder=bool(config.is_encoder_decoder))
    pixels = shape_read(processor_of(recipe))
    entries = {"pixel_values": pixels[None], "labels": torch.zeros(1, dtype=torch.long)}
    return Workload.of_entries(entries).of_rows(recipe.training.batch_size)


def model_dtype(recipe: Recipe) -> torch.dtype:
    """The type of the weights."""
    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    return dtype


def spec_of(recipe: Recipe, config: PreTrainedConfig) -> ModelSpec:
    """The recipe's model; `config` is of `model_config`. Raises UserError where a package for it is missing."""
    model = recipe.model
    return ModelSpec.of(
        model.path or config,
        dtype=model_dtype(recipe),
        attn_implementation=model.attn_implementation,
        trust_remote_code=model.trust_remote_code,
        config_overrides=_config_overrides_of(recipe, config),
        depth_scaled_feed_forward=model.depth_scaled_feed_forward,
        autocast=_autocast_of(recipe),
        quantization_config=_quantization_config_of(recipe, recipe.model.quantization),
        peft_config=_peft_config_of(recipe, config),
    )


def teacher_of(recipe: Recipe) -> ModelSpec | None:
    """The recipe's teacher that runs beside the model; None: there is none."""
    return None if recipe.distillation.top_k_file is not None else named_teacher(recipe)


def named_teacher(recipe: Recipe) -> ModelSpec | None:
    """The teacher that the recipe names; None: it names none. Raises UserError where a package for it is missing."""
    model, path = recipe.model, recipe.distillation.teacher
    if path is None:
        return None
    return ModelSpec.of(
        path,
        attn_implementation=model.attn_implementation,
        trust_remote_code=model.trust_remote_code,
        autocast=_autocast_of(recipe),
        quantization_config=_quantization_config_of(recipe, recipe.distillation.quantization),
    )


def _quantization_config_of(recipe: Recipe, kind: str | None) -> BitsAndBytesConfig | None:
    """How weights are quantised while they are loaded, if they are. Raises UserError without bitsandbytes."""
    if kind is None:
        return None
    need_bitsandbytes()
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=recipe.model.double_quantization,
        bnb_4bit_compute_dtype=_autocast_of(recipe) or model_dtype(recipe),
    )


def _peft_config_of(recipe: Recipe, config: PreTrainedConfig) -> Any:
    """The `peft_config` of a recipe's `Pipeline` for a model of this configuration. Raises UserError without peft."""
    lora = recipe.lora
    if not lora.is_on:
        return None
    need_peft()
    if lora.r is None:
        assert lora.path is not None
        if not has_adapters(lora.path):
            raise RecipeError(
                f"lora.path: there is no adapter_config.json in {lora.path!r}; give a directory of adapters"
            )
        return lora.path
    from peft import LoraConfig

    task_type = "SEQ_2_SEQ_LM" if config.is_encoder_decoder else "CAUSAL_LM"
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=lora.target_modules or "all-linear",
        modules_to_save=lora.modules_to_save or None,
        task_type=_TASK_TYPES.get(recipe.data.kind, task_type),
    )


def loss_of(recipe: Recipe) -> Loss:
    """The loss of training."""
    if recipe.data.kind == "rewards":
        return RewardLoss(recipe.rewards.center_rewards_coefficient)
    if recipe.data.kind == "embeddings":
        return EmbeddingLoss.of(recipe.embeddings)
    if recipe.data.kind == "prompts":
        return GRPOLoss.of(recipe.grpo)
    if recipe.data.kind == "kto":
        kto = recipe.kto
        return KTOLoss(kto.beta, kto.loss_type, kto.desirable_weight, kto.undesirable_weight)
    if recipe.data.kind != "preferences":
        distilled, training = recipe.distillation, recipe.training
        of_tokens = training.label_smoothing_factor, training.logit_clipping
        if distilled.teacher is None and distilled.top_k_file is None:
            return TokenLoss(*of_tokens)
        values: dict[str, Any] = {
            name: getattr(distilled, name) for name in ("beta", "temperature", "cross_entropy_share")
        }
        values["from_rows"] = distilled.top_k_file is not None
        return DistillationLoss(*of_tokens, **values)
    given = recipe.preferences
    others = {name: getattr(given, name) for name in ("reference_free", "simpo_gamma", "cpo_alpha")}
    return PreferenceLoss(given.beta, given.loss_type, given.label_smoothing, **others)


def _autocast_of(recipe: Recipe) -> torch.dtype | None:
    """The half precision that forwards compute in, if any."""
    return torch.bfloat16 if recipe.training.bf16 else torch.float16 if recipe.training.fp16 else None


def model_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedConfig:
    """The model's configuration, which has the tokenizer's ids wherever the recipe gives none, and its classes.

    Args:
        recipe: its model section.
        tokenizer: None: the recipe alone is looked at, before there is a tokenizer.

    Raises:
        UserError: an unknown family or field, a value that does not fit, or one that contradicts the tokenizer.
    """
    config = _config_of_language_model(recipe, tokenizer)
    if recipe.data.kind == "embeddings":
        change(config, as_embedder(config))
    if recipe.data.kind == "process_rewards" and not config.is_encoder_decoder:
        change(config, as_token_classifier(config, ["wrong", "right"]))
    if recipe.data.kind in CLASSIFIER_KINDS and not config.is_encoder_decoder:
        padding = 0 if tokenizer is None else PairCollator.for_tokenizer(tokenizer).pad_token_id
        change(config, _classifier_fields(recipe, config, padding))
    return config


def _classifier_fields(recipe: Recipe, config: PreTrainedConfig, pad_token_id: int | None = None) -> dict[str, Any]:
    """The fields of a language model's configuration as the recipe's classifier. Raises UnsupportedModelError."""
    is_reward = recipe.data.kind == "rewards"
    labels, problem = (["LABEL_0"], None) if is_reward else (recipe.data.labels, ONE_CLASS)
    try:
        if recipe.data.kind == "images":
            return as_image_classifier(config, labels)
        return as_classifier(config, labels, pad_token_id, problem)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"data.kind is {recipe.data.kind}, and {error}") from error


def _config_overrides_of(recipe: Recipe, config: PreTrainedConfig) -> dict[str, Any] | None:
    """The values in which the model at `model.path` shall differ from its configuration; `config`: `model_config`'s."""
    if recipe.model.path is None:
        return None
    given = recipe.model.config
    if recipe.data.kind == "embeddings":
        return given | as_embedder(config)
    if recipe.data.kind == "process_rewards":
        return given | as_token_classifier(config, ["wrong", "right"])
    if recipe.data.kind not in CLASSIFIER_KINDS:
        return given
    found = _classifier_fields(recipe, config)
    inner = {name: given[name] | found[name] for name in config.sub_configs if name in given and name in found}
    return given | found | inner


def _config_of_language_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedConfig:
    model = recipe.model
    if has_adapters(model.path):
        raise RecipeError(
            f"model.path {model.path!r} has PEFT adapters and no model; give the model that they belong to, and the "
            "adapters as lora.path"
        )
    if model.path is not None:
        values = {name: value for name, value in model.config.items() if name != "model_type"}
        try:
            config = read_config(model.path, trust_remote_code=model.trust_remote_code, overrides=values)
        except CheckpointError as error:
            raise RecipeError(f"model.path: {error}") from error
        if model.config.get("model_type", config.model_type) != config.model_type:
            raise RecipeError(
                f"model.config.model_type is {model.config['model_type']} and the model at {model.path!r} is a "
                f"{config.model_type}; leave model.config.model_type out, or give the path of another model"
            )
        if tokenizer is not None and len(tokenizer) > (size := config.get_text_config().vocab_size):
            raise RecipeError(
                f"the tokenizer has {len(tokenizer)} tokens and the model at {model.path!r} only {size}; "
                "set tokenizer.path to the model's own tokenizer"
            )
        return config
    fields = model.config if model.transformer is None else with_transformer(model.config, model.transformer)
    family, given = fields["model_type"], {k: v for k, v in fields.items() if k != "model_type"}
    check_sizes(given, "model.config.")
    if family not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"model.config.model_type: transformers has no model family {family!r}{nearest(family, CONFIG_MAPPING)}"
        )
    defaults = CONFIG_MAPPING[family]()
    known = {*defaults.to_dict(), *defaults.attribute_map}
    for name in given:
        if name not in known:
            raise RecipeError(f"model.config.{name} is not a field of a {family} configuration{nearest(name, known)}")
    if recipe.data.kind == "images":
        pass
    elif tokenizer is None:
        # Any token does that is in the vocabulary, as the family's own defaults may not be.
        given = dict.fromkeys(set(_TOKENS) & known, 0) | given
    else:
        given = _with_tokenizer(given, tokenizer, defaults)
    try:
        return AutoConfig.for_model(family, **given)
    except Exception as error:  # the library's checks of a field's type raise a class that is only an Exception
        raise RecipeError(f"model.config: {error}") from error


def _with_tokenizer(
    given: dict[str, Any], tokenizer: PreTrainedTokenizerBase, defaults: PreTrainedConfig
) -> dict[str, Any]:
    """A configuration's values completed by the tokenizer's."""
    starts_with_padding = defaults.model_type in _STARTS_WITH_PADDING
    start = tokenizer.pad_token_id if starts_with_padding else tokenizer.eos_token_id
    tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, start)
    # Some families do not declare the decoder's start token, but all of them read it.
    fields = {*defaults.to_dict(), *(["decoder_start_token_id"] if defaults.is_encoder_decoder else [])}
    values = dict(given)
    for name, token in zip(_TOKENS, tokens, strict=True):
        if token is None or name not in fields:
            continue
        if values.setdefault(name, token) != token and name not in _FREE_TOKENS:
            raise RecipeError(
                f"model.config.{name} is {given[name]} and the tokenizer's is {token}; leave it out, it is taken from "
                "the tokenizer"
            )
    if values.setdefault("vocab_size", len(tokenizer)) < len(tokenizer):
        raise RecipeError(
            f"model.config.vocab_size is {values['vocab_size']} and the tokenizer has {len(tokenizer)} tokens; leave "
            "it out, it is taken from the tokenizer"
        )
    return values


def sorts_rows(recipe: Recipe) -> bool:
    """Whether rows of similar length share a mini-batch; images are all alike."""
    return recipe.training.length_bucketing and recipe.data.kind in OF_TEXT.names


def arguments_of(recipe: Recipe) -> PipelineTrainingArguments:
    """The trainer's arguments, for a `Pipeline` that the recipe has made: its own settings need not be repeated."""
    training, pipeline = recipe.training, recipe.pipeline
    same_name = (
        *("output_dir", "seed", "num_train_epochs", "gradient_accumulation_steps", "learning_rate"),
        *("lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
        *("bf16", "fp16", "fp32_master_weights", "offload_optimizer", "on_nonfinite_loss"),
        *("timeline_steps", "slow_machine_steps"),
        *("max_grad_norm", "logging_steps", "save_total_limit", "save_in_background", "memory_save_steps"),
        *("load_best_model_at_end", "run_name", "push_to_hub", "hub_model_id", "hub_private_repo"),
    )
    made_as: type[PipelineTrainingArguments] = PipelineTrainingArguments
    others: dict[str, Any] = {}
    if recipe.data.kind == "preferences":
        from hf_gpipe.training.dpo import PipelineDPOConfig  # the planner's command needs no trainer

        made_as, others = PipelineDPOConfig, {**vars(recipe.preferences), "max_length": recipe.data.max_length}
    if recipe.data.kind == "kto":
        from hf_gpipe.training.kto import PipelineKTOConfig

        made_as, others = PipelineKTOConfig, {**vars(recipe.kto), "max_length": recipe.data.max_length}
    if recipe.data.kind == "rewards":
        from hf_gpipe.training.reward import PipelineRewardConfig

        made_as, others = PipelineRewardConfig, {**vars(recipe.rewards), "max_length": recipe.data.max_length}
    if recipe.data.kind == "embeddings":
        from hf_gpipe.training.embeddings import PipelineEmbeddingConfig

        made_as, others = PipelineEmbeddingConfig, {**vars(recipe.embeddings), "max_length": recipe.data.max_length}
    if recipe.data.kind == "prompts":
        from hf_gpipe.training.grpo_config import PipelineGRPOConfig

        values = {name: value for name, value in vars(recipe.grpo).items() if name != "reward"}
        made_as, others = PipelineGRPOConfig, {**values, "max_length": recipe.data.max_length}
    order = "group_by_length" if sorts_rows(recipe) else "random"
    if recipe.data.kind == "kto":  # so that each mini-batch is that of the reference's pass
        order = "sequential"
    if training.lr_scheduler_type == "warmup_stable_decay":
        others |= {"lr_scheduler_kwargs": {"num_decay_steps": training.decay_steps}}
    return made_as(
        **others,
        **{name: getattr(training, name) for name in same_name},
        max_steps=training.max_steps or -1,
        per_device_train_batch_size=training.batch_size,
        per_device_eval_batch_size=training.batch_size,
        batch_tokens=training.batch_tokens,
        # A stream draws its pairs by temperature itself.
        sampling_temperature=1.0 if recipe.data.streaming else recipe.data.temperature,
        train_sampling_strategy=order,
        logging_first_step=True,
        eval_strategy="steps" if training.eval_steps else "no",
        eval_steps=training.eval_steps,
        save_strategy="steps" if training.save_steps else "no",
        save_steps=training.save_steps or 500,
        include_for_metrics=["loss"],
        report_to=training.report_to or "none",
        disable_tqdm=False,
        use_cpu=pipeline.device == "cpu",
        ddp_timeout=int(pipeline.timeout_seconds),
        enable_jit_checkpoint=True,
        stop_seconds=training.stop_seconds,
        remove_unused_columns=False,
    )
