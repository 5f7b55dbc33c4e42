"""The recipe, and those of its sections that are small. `hf_gpipe.settings.section` explains how a field is written."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from hf_gpipe.errors import UserError
from hf_gpipe.recipe.data import DataSection
from hf_gpipe.recipe.strict_yaml import write
from hf_gpipe.recipe.training import TrainingSection
from hf_gpipe.recipe.transformer import with_transformer
from hf_gpipe.registry import has_own_task, task_of_kind
from hf_gpipe.schedule import Schedule
from hf_gpipe.settings.kinds import PAIRS, TOKENIZED, uses
from hf_gpipe.settings.losses import (
    DistillationSection,
    EmbeddingsSection,
    GRPOSection,
    KTOSection,
    PreferencesSection,
    RewardsSection,
)
from hf_gpipe.settings.pipeline import PipelineConfig
from hf_gpipe.settings.section import (
    MAY_CHANGE,
    Count,
    CountOrZero,
    Fraction,
    Key,
    Place,
    Settings,
    Text,
    keys_of,
    refuse_given,
)


class ModelSection(Settings):
    """The transformers model to train, pretrained or new."""

    path: Place | None = None
    """Hub id or directory whose weights are loaded; null: a new model is initialised from `config`."""

    config: dict[str, Any] = Field(default_factory=dict)
    """`model_type` (marian, llama, ...) and the fields of its transformers config; with `path`, fields to override."""

    transformer: Text | None = None
    """Size of a new t5, mt5 or umt5 model, such as T(6, 8192, 16): 6 layers each in encoder and decoder, feed-forward
    layers of width 8192, and 16 heads, whose width is 64 unless `config` has d_kv. null: `config` has the size."""

    depth_scaled_feed_forward: bool = False
    """Whether a new model scales the initial weights of the last projection of each feed-forward block by 1/L, where L
    is the number of layers of its stack."""

    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Data type of the weights, of the computation and of the tensors that stages exchange."""

    attn_implementation: Text | None = None
    """Attention implementation of transformers: eager, sdpa, flash_attention_2, ...; null: the model's default."""

    trust_remote_code: bool = False
    """Whether to run Python code that comes with the model at `path`. Give it on the command line
    (model.trust_remote_code=true); true in a file is an error."""

    quantization: Literal["nf4", "fp4", "int8"] | None = None
    """The form to which the weights of linear layers are quantised while they are loaded: nf4 or fp4, 4 bits each, or
    int8. Quantised weights are not trained, so this needs `lora.r` or `lora.path`, and the package bitsandbytes. null:
    the weights stay as at `path`, where bitsandbytes may have quantised them already."""

    double_quantization: bool = False
    """With nf4 and fp4: whether the scales of the 4-bit blocks are quantised too, which saves 0.4 bits per weight."""

    def model_post_init(self, context: Any, /) -> None:
        model_type = self.config.get("model_type")
        if model_type is not None and not isinstance(model_type, str):
            raise UserError(f"config.model_type is {model_type!r}; it must be a name such as marian or llama.")
        if self.path is None and not model_type:
            raise UserError(
                "path and config.model_type are missing; give path (a Hub id or a directory) for the weights of a "
                "model, or config.model_type (marian, llama, ...) with the fields of its config for a new one."
            )
        if self.path is not None:
            why = f"path is {self.path!r}, whose model has a size and weights already; leave path out"
            refuse_given(self, ("transformer", "depth_scaled_feed_forward"), why)
        elif self.transformer is not None:
            with_transformer(self.config, self.transformer, "transformer", "config.")
        if self.quantization not in ("nf4", "fp4"):
            why = f"quantization is {self.quantization or 'null'}; set that to nf4 or fp4"
            refuse_given(self, ("double_quantization",), why)
        if self.quantization is not None:
            why = f"quantization is {self.quantization}, and it is for new weights that are trained; leave that out"
            refuse_given(self, ("depth_scaled_feed_forward",), why)
            if self.dtype == "float64":
                raise UserError(
                    "quantization is for dtype float32, bfloat16 or float16, and it is float64; set bfloat16."
                )


class LoraSection(Settings):
    """LoRA: small matrices beside linear layers are trained, and the weights of the model stay as they are."""

    r: Count | None = None
    """Rank of the matrices; null: no new matrices are made, and without `path` all weights are trained. The keys are
    those of the package peft."""

    lora_alpha: Count = 16
    """The product of the matrices is multiplied by lora_alpha / r."""

    lora_dropout: Fraction = 0.0
    """Dropout of the input of the matrices."""

    target_modules: list[Text] = Field(default_factory=list)
    """Names of the linear layers and embeddings that get matrices, such as [q_proj, v_proj, embed_tokens]; empty: all
    linear layers of the blocks."""

    modules_to_save: list[Text] = Field(default_factory=list)
    """Names of modules that are trained whole beside the matrices, such as [embed_tokens, lm_head]."""

    path: Place | None = None
    """A directory with saved adapters of the model at `model.path`, in peft's format, that are trained further. They
    bring the settings of all other keys of this section."""

    def model_post_init(self, context: Any, /) -> None:
        others = [name for name in keys_of(LoraSection) if name != "path"]
        if self.path is not None:
            refuse_given(self, others, f"path is {self.path!r}, whose adapters have their own settings; leave path out")
        elif self.r is None:
            refuse_given(self, others, "r is null, so there is no LoRA; set r")

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained, new or saved ones."""
        return self.r is not None or self.path is not None


class TokenizerSection(Settings):
    """The tokenizer, loaded, or trained on the corpus as the other keys say."""

    kinds = TOKENIZED

    path: Place | None = None
    """Hub id or directory to load from; null: the tokenizer of `model.path`, or, without one, a tokenizer that is
    trained on the corpus."""

    vocab_size: Annotated[int, Field(ge=1, le=2_000_000)] = 8000
    """Vocabulary size of a trained tokenizer, including the special tokens and the 256 bytes."""

    model: Literal["unigram", "bpe"] = "unigram"
    """SentencePiece model type of a trained tokenizer."""

    character_coverage: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the corpus's characters that are covered by tokens; the others are encoded as bytes."""

    training_pairs: Count | None = None
    """Number of pairs or documents, sampled from the corpus, on which a tokenizer is trained; null: 250,000, or 100,000
    of a stream."""

    def model_post_init(self, context: Any, /) -> None:
        if self.path is not None:
            self.check_loaded(f"path is {self.path!r}, whose tokenizer is trained already; leave path out")

    def check_loaded(self, why: str) -> None:
        """Raise UserError for a key of a trained tokenizer, because the tokenizer is loaded, as `why` says."""
        refuse_given(self, [name for name in keys_of(TokenizerSection) if name != "path"], why)


class EvaluationSection(Settings):
    """Evaluation after training: scores of translations, loss of text, accuracy on preferences."""

    max_examples: Count | None = None
    """Number of pairs of each language, of blocks of text, or of other rows to evaluate; null: the whole split."""

    batch_size: Count = 64
    """Number of examples to translate or evaluate at a time."""

    max_new_tokens: Count = 64
    """Maximum length of a translation, in tokens."""

    num_beams: Annotated[Count, PAIRS] = 1
    """Number of beams of the search for a translation; 1: greedy."""

    split: Literal["test", "validation"] = "test"
    """Split to evaluate."""

    samples: Annotated[CountOrZero, PAIRS] = 5
    """Number of translations shown in the summary."""


class Recipe(Settings):
    """All settings of a run."""

    model: ModelSection
    lora: LoraSection = LoraSection()
    preferences: PreferencesSection = PreferencesSection()
    kto: KTOSection = KTOSection()
    rewards: RewardsSection = RewardsSection()
    embeddings: EmbeddingsSection = EmbeddingsSection()
    grpo: GRPOSection = GRPOSection()
    distillation: DistillationSection = DistillationSection()
    data: DataSection
    tokenizer: TokenizerSection = TokenizerSection()
    pipeline: Annotated[PipelineConfig, MAY_CHANGE] = PipelineConfig()
    training: TrainingSection
    evaluation: Annotated[EvaluationSection, MAY_CHANGE] = EvaluationSection()

    @property
    def companion(self) -> tuple[str, Any] | None:
        """The section that names a model beside the trained one, and its name; None: there is none."""
        return next(((name, own) for name, own in vars(self).items() if getattr(own, "companion", None)), None)

    def table(self, num_processes: int) -> Schedule | None:
        """The table of a step from the file that `pipeline.schedule` names; raises as `PipelineConfig.table`."""
        return self.pipeline.table(self.training.size.accumulation, num_processes)

    def to_yaml(self) -> str:
        """The resolved recipe as YAML, with the defaults of the keys that its kind of data uses.

        `load_recipe` reads it back as an equal recipe.
        """
        values: dict[str, dict[str, Any]] = {}
        for (name, key), value in self.values().items():
            values.setdefault(name, {})[key] = value
        return write(values)

    def values(self) -> dict[tuple[str, str], Any]:
        """The value of every key that the recipe's kind of data uses."""
        return {
            (name, key.name): key.value_in(getattr(self, name))
            for name, key in all_keys(self.data.kind)
            if uses(self.data.kind, key.kinds)
        }


SECTIONS: dict[str, Any] = {name: info.annotation for name, info in Recipe.model_fields.items()}
"""The class of each section."""


def sections_of(kind: object) -> dict[str, Any]:
    """The class of each section of a recipe with this kind of data.

    A task of one's own has one more, under the name of its kind, with the options of its loss.
    """
    own = task_of_kind(str(kind)).section if has_own_task(kind) else None
    return SECTIONS if own is None else {**SECTIONS, str(kind): own}


def recipe_of(sections: Mapping[str, Any]) -> Recipe:
    """The recipe of sections by their names."""
    own: dict[str, Any] = {name: type(given) for name, given in sections.items() if name not in SECTIONS}
    return _class_with(**own)(**sections)


@cache
def _class_with(**own: Any) -> type[Recipe]:
    """The class of recipes that have more sections."""
    fields: Any = {name: (cls, ...) for name, cls in own.items()}
    return create_model("Recipe", __base__=Recipe, **fields) if own else Recipe


def all_keys(kind: object = None) -> list[tuple[str, Key]]:
    """Every key with the name of its section, in the order of the fields; with a task's own, where the kind has one."""
    return [(name, key) for name, cls in sections_of(kind).items() for key in keys_of(cls).values()]


def may_change() -> set[tuple[str, str]]:
    """The keys that a resumed run may change."""
    whole = {name for name, info in Recipe.model_fields.items() if MAY_CHANGE in info.metadata}
    return {(name, key.name) for name, key in all_keys() if key.may_change or name in whole}
