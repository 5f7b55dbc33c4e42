"""`Pipeline`, which connects the parts: what is asked (request.py), decided (decision.py), built and run (steps.py)."""

from hf_gpipe.model.spec import ModelSource
from hf_gpipe.pipeline.pipeline import Pipeline
from hf_gpipe.pipeline.request import PipelineRequest
from hf_gpipe.pipeline.steps import Update, UpdateStage
from hf_gpipe.runtime.evaluation import Evaluation

__all__ = ["Evaluation", "ModelSource", "Pipeline", "PipelineRequest", "Update", "UpdateStage"]
