"""transformers' auto classes beside those of language models, and the models that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from hf_gpipe.errors import UnsupportedModelError
from hf_gpipe.libraries.transformers import modeling_auto as auto


@dataclass(frozen=True)
class AutoClass:
    """An auto class.

    Attributes:
        name: such as AutoModelForSequenceClassification.
        mapping: class of a configuration -> class of its model, or several.
        names: of the classes of models.
        families: some that have such a model, for errors.
    """

    name: str
    mapping: Mapping[Any, Any]
    names: frozenset[str]
    families: str

    def of_family(self, config: PreTrainedConfig) -> tuple[type[PreTrainedModel], ...]:
        """The classes of models for a configuration's family; most families have one, or none."""
        classes = self.mapping.get(type(config), ())
        return classes if isinstance(classes, tuple) else (classes,)

    def named_by(self, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
        """The class of a model whose configuration says that it is one of these; None: it is another model."""
        name = (config.architectures or [""])[0]
        classes = self.of_family(config) if name in self.names else ()
        return next((own for own in classes if own.__name__ == name), classes[0] if classes else None)

    def fields(self, config: PreTrainedConfig, labels: Sequence[str]) -> dict[str, Any]:
        """The fields by which a configuration becomes that of its family's model with these names of classes.

        Raises UnsupportedModelError where the family has no such model.
        """
        classes = self.of_family(config)
        if not classes:
            raise UnsupportedModelError(
                f"transformers has no model of the family {config.model_type} for {self.name}; choose another family, "
                f"such as {self.families}"
            )
        return {
            "architectures": [classes[0].__name__],
            "id2label": dict(enumerate(labels)),
            "label2id": {name: number for number, name in enumerate(labels)},
        }


def _flat(names: Mapping[str, str | tuple[str, ...]]) -> frozenset[str]:
    return frozenset(name for some in names.values() for name in ((some,) if isinstance(some, str) else some))


IMAGE_CLASSIFICATION = AutoClass(
    "AutoModelForImageClassification",
    auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    _flat(auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    "resnet or vit",
)
SEQUENCE_CLASSIFICATION = AutoClass(
    "AutoModelForSequenceClassification",
    auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    _flat(auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
    "llama or qwen3",
)
TOKEN_CLASSIFICATION = AutoClass(
    "AutoModelForTokenClassification",
    auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    _flat(auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
    "llama or qwen3",
)
#: Models without a head. In some families the class is that of the language model.
HEADLESS = AutoClass(
    "AutoModel",
    auto.MODEL_MAPPING,
    _flat(auto.MODEL_MAPPING_NAMES) - _flat(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "bert, xlm-roberta or qwen3",
)


def text_part_named_by(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The language model that a configuration names and AutoModelForCausalLM does not find; None: it is another model.

    AutoModelForCausalLM makes Emu3's text part from the configuration of the whole Emu3. A checkpoint of this part has
    the configuration of the part, from which the auto class makes nothing.
    """
    name = (config.architectures or [""])[0]
    if type(config) in auto.MODEL_FOR_CAUSAL_LM_MAPPING or not name.endswith("ForCausalLM"):
        return None
    named = getattr(transformers, name, None)
    return named if getattr(named, "config_class", None) is type(config) else None
