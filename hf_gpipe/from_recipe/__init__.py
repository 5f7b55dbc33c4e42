"""Makes the training of a recipe: the model, the trainer, the job of the train command, and its results."""
