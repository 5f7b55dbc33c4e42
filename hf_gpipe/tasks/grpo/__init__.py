"""GRPO: rewards of the model's own completions, as TRL's GRPOTrainer learns from them."""

from hf_gpipe.tasks.grpo.task import TASK as TASK
