"""Training: arguments, the trainer, its data, optimizer, evaluation and pictures."""
