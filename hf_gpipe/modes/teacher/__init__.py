"""A teacher beside the model: its stages run in F alone, and the loss of the last stage reads its logits."""
