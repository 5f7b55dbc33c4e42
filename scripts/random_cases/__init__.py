"""Random models, options and mini-batches, each compared with the plain model: see `scripts/random_search.py`.

`draw` makes case number n of a seed, `fields` changes a configuration, `run` compares. Equal seeds and numbers make the
same case on the same version of transformers.
"""
