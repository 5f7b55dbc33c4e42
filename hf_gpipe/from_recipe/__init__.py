"""From a recipe to its training: the model, the trainer, the job of the train command, and its results."""
