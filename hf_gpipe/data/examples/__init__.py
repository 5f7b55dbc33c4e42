"""Examples of each other kind of data, as token ids or pixels: texts, conversations, preferences, labels, images."""
