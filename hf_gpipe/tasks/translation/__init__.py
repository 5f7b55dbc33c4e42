"""Translation: pairs of texts in files, on the Hub or generated, of an encoder-decoder or in one sequence."""
