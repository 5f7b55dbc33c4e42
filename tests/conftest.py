"""What holds for every test."""

import os

# Before anything reads it: no test asks a hub, and a model that is not there is told at once.
os.environ["HF_HUB_OFFLINE"] = "1"
