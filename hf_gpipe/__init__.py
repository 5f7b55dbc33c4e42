"""GPipe for Hugging Face models: pipeline-parallel training that gives the unpartitioned model's gradients.

The public names load when they are first used, so that `import hf_gpipe.recipe` and the other modules that
need no torch start at once.
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_gpipe.adapters.transformer_size import transformer_config
    from hf_gpipe.pipeline import Pipeline
    from hf_gpipe.recipe import PipelineConfig
    from hf_gpipe.runtime.custom_loss import LogitsLoss, RowLoss
    from hf_gpipe.runtime.distillation import DistillationLoss
    from hf_gpipe.runtime.loss import Loss, LossInputs, Reads
    from hf_gpipe.training.arguments import PipelineTrainingArguments
    from hf_gpipe.training.dpo import PipelineDPOConfig, PipelineDPOTrainer
    from hf_gpipe.training.embedding_loss import EmbeddingLoss
    from hf_gpipe.training.embeddings import PipelineEmbeddingConfig, PipelineEmbeddingTrainer
    from hf_gpipe.training.grpo import PipelineGRPOConfig, PipelineGRPOTrainer
    from hf_gpipe.training.kto import PipelineKTOConfig, PipelineKTOTrainer
    from hf_gpipe.training.reward import PipelineRewardConfig, PipelineRewardTrainer
    from hf_gpipe.training.sft import PipelineSFTTrainer
    from hf_gpipe.training.sft_config import PipelineSFTConfig
    from hf_gpipe.training.trainer import PipelineTrainer

__version__ = "0.1.0"

__all__ = [
    "DistillationLoss",
    "EmbeddingLoss",
    "LogitsLoss",
    "Loss",
    "LossInputs",
    "Pipeline",
    "PipelineConfig",
    "PipelineDPOConfig",
    "PipelineDPOTrainer",
    "PipelineEmbeddingConfig",
    "PipelineEmbeddingTrainer",
    "PipelineGRPOConfig",
    "PipelineGRPOTrainer",
    "PipelineKTOConfig",
    "PipelineKTOTrainer",
    "PipelineRewardConfig",
    "PipelineRewardTrainer",
    "PipelineSFTConfig",
    "PipelineSFTTrainer",
    "PipelineTrainer",
    "PipelineTrainingArguments",
    "Reads",
    "RowLoss",
    "__version__",
    "transformer_config",
]

_MODULE_OF = {
    "DistillationLoss": "hf_gpipe.runtime.distillation",
    "EmbeddingLoss": "hf_gpipe.training.embedding_loss",
    "LogitsLoss": "hf_gpipe.runtime.custom_loss",
    "Loss": "hf_gpipe.runtime.loss",
    "LossInputs": "hf_gpipe.runtime.loss",
    "Pipeline": "hf_gpipe.pipeline",
    "PipelineConfig": "hf_gpipe.recipe",
    "PipelineDPOConfig": "hf_gpipe.training.dpo",
    "PipelineDPOTrainer": "hf_gpipe.training.dpo",
    "PipelineEmbeddingConfig": "hf_gpipe.training.embeddings",
    "PipelineEmbeddingTrainer": "hf_gpipe.training.embeddings",
    "PipelineGRPOConfig": "hf_gpipe.training.grpo",
    "PipelineGRPOTrainer": "hf_gpipe.training.grpo",
    "PipelineKTOConfig": "hf_gpipe.training.kto",
    "PipelineKTOTrainer": "hf_gpipe.training.kto",
    "PipelineRewardConfig": "hf_gpipe.training.reward",
    "PipelineRewardTrainer": "hf_gpipe.training.reward",
    "PipelineSFTConfig": "hf_gpipe.training.sft_config",
    "PipelineSFTTrainer": "hf_gpipe.training.sft",
    "PipelineTrainer": "hf_gpipe.training.trainer",
    "PipelineTrainingArguments": "hf_gpipe.training.arguments",
    "Reads": "hf_gpipe.runtime.loss",
    "RowLoss": "hf_gpipe.runtime.custom_loss",
    "transformer_config": "hf_gpipe.adapters.transformer_size",
}


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
    return sorted(__all__)
