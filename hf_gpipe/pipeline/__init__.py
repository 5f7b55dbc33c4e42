"""`Pipeline`: its request and the decisions (decision.py), its stages (building.py), and its steps (steps.py)."""

from hf_gpipe.model.spec import ModelSource
from hf_gpipe.pipeline.decision import PipelineRequest
from hf_gpipe.pipeline.pipeline import Pipeline
from hf_gpipe.pipeline.steps import Update, UpdateStage
from hf_gpipe.runtime.evaluation import Evaluation

__all__ = ["Evaluation", "ModelSource", "Pipeline", "PipelineRequest", "Update", "UpdateStage"]
