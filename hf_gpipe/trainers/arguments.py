"""The arguments that the trainers of TRL's interface share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from hf_gpipe.errors import UserError
from hf_gpipe.libraries.transformers_trainer import FIELDS_OF_JSON
from hf_gpipe.losses.noting import NotingLoss
from hf_gpipe.recipe import TrainingSection
from hf_gpipe.settings.kinds import uses
from hf_gpipe.settings.losses import PreferencesSection
from hf_gpipe.settings.section import Settings, keys_of, values_in
from hf_gpipe.training.arguments import PipelineTrainingArguments, argument, key_of, with_keys_of


@dataclass
class ModelArguments(PipelineTrainingArguments):
    """The arguments about the model that all configurations of TRL have.

    A Hub id or directory is read in float32, whatever the type of its files is, and forwards compute in bfloat16: an
    update of a weight in bfloat16 that is smaller than 1/256 of the weight would be lost. A model in memory keeps its
    type.

    Raises:
        UserError: an argument that a pipeline does not support.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*FIELDS_OF_JSON, "model_init_kwargs"]

    logging_steps: float = argument(10, "Number of optimizer steps between two lines of metrics.")
    bf16: bool | None = argument(None, "Whether forwards compute in bfloat16; None: they do unless fp16 is set.")
    model_init_kwargs: dict[str, Any] | str | None = argument(
        None,
        "Options of a model that is a Hub id or directory: dtype (default: float32), attn_implementation, "
        "trust_remote_code, quantization_config, and values of its configuration.",
    )
    trust_remote_code: bool = argument(False, "Whether a Hub model and its tokenizer may run Python code of their own.")

    def __post_init__(self) -> None:
        self.bf16 = not self.fp16 if self.bf16 is None else self.bf16
        super().__post_init__()

    @property
    def trusts_model(self) -> bool:
        """Whether the code of a model may be run."""
        return bool(self._init_kwargs.get("trust_remote_code", self.trust_remote_code))

    @property
    def _init_kwargs(self) -> dict[str, Any]:
        return dict(self.model_init_kwargs) if isinstance(self.model_init_kwargs, dict) else {}

    def model_options(self, model: Any, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The options of `ModelSpec` for a model; none for a model in memory or a configuration.

        Args:
            model: the model, which is not a Pipeline.
            changes: more fields of the configuration of a model that is read.

        Raises:
            UserError: `model_init_kwargs` has an option that is not supported, or the model is not read.
        """
        given = self._init_kwargs
        if not isinstance(model, str | os.PathLike):
            if given:
                raise UserError(
                    "model_init_kwargs are for a model that is read from a Hub id or directory; set them when you make "
                    "the model"
                )
            return {}
        for name in ("revision", "device_map"):
            if given.pop(name, None) not in (None, "auto", "main"):
                advice = (
                    "the pipeline places the stages"
                    if name == "device_map"
                    else "download that revision, give its path"
                )
                raise UserError(f"model_init_kwargs: {name} is not supported ({advice}); leave it out")
        given.pop("trust_remote_code", None)
        dtype = given.pop("dtype", given.pop("torch_dtype", "float32"))
        options = {"dtype": None if dtype == "auto" else dtype, "trust_remote_code": self.trusts_model or None}
        options |= {name: given.pop(name, None) for name in ("attn_implementation", "quantization_config")}
        options["config_overrides"] = {**given, **(changes or {})} or None
        return {name: value for name, value in options.items() if value is not None}


@dataclass
class LanguageModelArguments(ModelArguments):
    """The arguments about the model of trainers that learn texts, whose loss has the auxiliary loss of experts.

    Raises:
        UserError: an argument that a pipeline does not support.
    """

    router_aux_loss_coef: float | None = argument(
        None, "Weight of the auxiliary loss of a mixture of experts; 0: no such loss; None: as in its configuration."
    )

    def auxiliary(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Values of the configuration of a mixture of experts, whose auxiliary loss TRL turns on; of others, none.

        Raises UserError where the loss is asked for and the model has none.
        """
        coefficient = self.router_aux_loss_coef
        if not hasattr(config, "output_router_logits"):
            if coefficient:
                raise UserError(
                    f"router_aux_loss_coef={coefficient!r}: {config.model_type} has no auxiliary loss of experts; "
                    "leave it out"
                )
            return {}
        used = getattr(config, "router_aux_loss_coef", 0.0) if coefficient is None else coefficient
        return {"output_router_logits": bool(used), "router_aux_loss_coef": used}


@dataclass
class TaskArguments(PipelineTrainingArguments):
    """Arguments of a trainer with a loss of its own, TRL's by their names.

    Raises:
        UserError: an argument that a pipeline does not support.
    """

    logging_steps: float = argument(10, "Updates between two lines of metrics.")
    max_length: int | None = argument(1024, "Tokens of a prompt with its answer at most; None: any number.")
    disable_dropout: bool = key_of(PreferencesSection, "disable_dropout")
    #: The class of the loss. Each of its options is an argument.
    _loss: ClassVar[type[NotingLoss]]
    #: The section of a recipe that has the options of the loss, and perhaps other keys, which are arguments too.
    section: ClassVar[type[Settings]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "_loss" in vars(cls):
            cls.section = vars(cls).get("section", type(cls._loss.options))
            above = [base for base in cls.__mro__[1:] if issubclass(base, TaskArguments) and base is not TaskArguments]
            said = [name for base in above for name in base.__annotations__]
            for settings in dict.fromkeys((type(cls._loss.options), cls.section)):
                with_keys_of(settings, but=said)(cls)

    def check(self) -> None:
        super().check()
        for name, key in keys_of(TrainingSection).items():
            if not uses("preferences", key.kinds) and (value := getattr(self, name)) not in (None, key.default):
                raise UserError(
                    f"{name}={value!r}: mini-batches are made of whole examples, and the loss is not the "
                    "cross-entropy; leave it out"
                )
        self.section(**values_in(self, self.section))
        self.make_loss()

    def make_loss(self) -> Any:
        """The loss that these arguments ask for, a `NotingLoss`."""
        return self._loss.of(self)

    @property
    def of_example(self) -> tuple[int, int]:
        """The rows that an example becomes, and the most tokens that are generated after its own."""
        return self.make_loss().rows_per_unit, 0


@dataclass
class ReferenceArguments(LanguageModelArguments, TaskArguments):
    """Arguments of a trainer with a reference, TRL's by their names.

    Raises:
        UserError: an argument that a pipeline does not support.
    """

    learning_rate: float = argument(1e-6, "Peak learning rate.")
    precompute_ref_log_probs: bool = argument(
        PreferencesSection().precompute_ref_log_probs,
        "Whether the reference's log-probabilities are computed once, before the training. They are in any "
        "case, unless the model gets new PEFT adapters.",
    )

    @property
    def loss_text(self) -> str:
        """The loss, in messages."""
        return f"loss_type={self.loss_type!r}"
