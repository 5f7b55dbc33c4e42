"""A head that is divided by the vocabulary over all stages (vocabulary parallelism, arXiv 2411.05288)."""
