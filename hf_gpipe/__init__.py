"""GPipe for Hugging Face models: pipeline-parallel training that gives the unpartitioned model's gradients.

The public names load when they are first used, so that `import hf_gpipe.recipe` and the other modules that
need no torch start at once.
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `as` tells type checkers that a name is public
    from hf_gpipe.from_recipe.transformer_size import transformer_config as transformer_config
    from hf_gpipe.losses.custom import LogitsLoss as LogitsLoss
    from hf_gpipe.losses.custom import RowLoss as RowLoss
    from hf_gpipe.losses.embeddings import EmbeddingLoss as EmbeddingLoss
    from hf_gpipe.losses.loss import Loss as Loss
    from hf_gpipe.losses.loss import LossInputs as LossInputs
    from hf_gpipe.losses.loss import Reads as Reads
    from hf_gpipe.pipeline import Pipeline as Pipeline
    from hf_gpipe.settings.pipeline import PipelineConfig as PipelineConfig
    from hf_gpipe.tasks.distil import DistillationLoss as DistillationLoss
    from hf_gpipe.tasks.dpo import PipelineDPOConfig as PipelineDPOConfig
    from hf_gpipe.tasks.dpo import PipelineDPOTrainer as PipelineDPOTrainer
    from hf_gpipe.tasks.embeddings import PipelineEmbeddingConfig as PipelineEmbeddingConfig
    from hf_gpipe.tasks.embeddings import PipelineEmbeddingTrainer as PipelineEmbeddingTrainer
    from hf_gpipe.tasks.grpo.config import PipelineGRPOConfig as PipelineGRPOConfig
    from hf_gpipe.tasks.grpo.trainer import PipelineGRPOTrainer as PipelineGRPOTrainer
    from hf_gpipe.tasks.kto import PipelineKTOConfig as PipelineKTOConfig
    from hf_gpipe.tasks.kto import PipelineKTOTrainer as PipelineKTOTrainer
    from hf_gpipe.tasks.reward import PipelineRewardConfig as PipelineRewardConfig
    from hf_gpipe.tasks.reward import PipelineRewardTrainer as PipelineRewardTrainer
    from hf_gpipe.tasks.sft import PipelineSFTConfig as PipelineSFTConfig
    from hf_gpipe.tasks.sft import PipelineSFTTrainer as PipelineSFTTrainer
    from hf_gpipe.training.arguments import PipelineTrainingArguments as PipelineTrainingArguments
    from hf_gpipe.training.trainer import PipelineTrainer as PipelineTrainer

__version__ = "0.1.0"

_NAMES_OF = {
    "from_recipe.transformer_size": ("transformer_config",),
    "pipeline": ("Pipeline",),
    "settings.pipeline": ("PipelineConfig",),
    "losses.custom": ("LogitsLoss", "RowLoss"),
    "tasks.distil": ("DistillationLoss",),
    "losses.loss": ("Loss", "LossInputs", "Reads"),
    "training.arguments": ("PipelineTrainingArguments",),
    "tasks.dpo": ("PipelineDPOConfig", "PipelineDPOTrainer"),
    "losses.embeddings": ("EmbeddingLoss",),
    "tasks.embeddings": ("PipelineEmbeddingConfig", "PipelineEmbeddingTrainer"),
    "tasks.grpo.config": ("PipelineGRPOConfig",),
    "tasks.grpo.trainer": ("PipelineGRPOTrainer",),
    "tasks.kto": ("PipelineKTOConfig", "PipelineKTOTrainer"),
    "tasks.reward": ("PipelineRewardConfig", "PipelineRewardTrainer"),
    "tasks.sft": ("PipelineSFTConfig", "PipelineSFTTrainer"),
    "training.trainer": ("PipelineTrainer",),
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _NAMES_OF.items() for name in names}

__all__ = sorted([*_MODULE_OF, "__version__"])


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    was_enabled = gc.isenabled()
    gc.disable()  # torch and transformers make a million objects, none of them garbage: an import is 1 s faster
    try:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    finally:
        if was_enabled:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
