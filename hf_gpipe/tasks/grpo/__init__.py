"""GRPO: rewards of the model's own completions, as TRL's GRPOTrainer learns from them."""
