"""Trains: arguments, `PipelineTrainer` and its loop, mini-batches, optimizer, evaluation and checkpoints."""
