"""Losses: what each reads of a model, and the loss of each unit. A loss of your own is one class beside these."""
