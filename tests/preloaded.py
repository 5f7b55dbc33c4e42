"""The imports of the process that tests fork (tests/gloo.py): most of those of its children; models load on first use.

It also runs a step of two tiny models, and observes those that most tests have, so that what is made once in a process
is there in every child.

The garbage collector leaves out what is imported: else each child looks at a million objects of others, and gets pages
of its own for them.
"""

import gc
import importlib
from contextlib import suppress
from itertools import product

NAMES = (
    *("hf_gpipe.from_recipe.job", "hf_gpipe.planner.decide", "tests.oracle", "tests.training.toy", "scripts.forked"),
    *("pytest", "hypothesis", "matplotlib.backends.backend_agg", "sacrebleu", "sacrebleu.tokenizers.tokenizer_13a"),
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("bart", "llama", "m2m_100", "marian", "mixtral", "t5")
    ),
)

#: Of tests/oracle.py.
FAMILIES = ("llama", "marian", "m2m_100", "bart")


def warm_up() -> None:
    """Read and save no file, start no thread, and leave the random numbers as they are."""
    import torch
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from hf_gpipe.adapters import adapter_for
    from hf_gpipe.pipeline.clone_steps import split_step
    from hf_gpipe.pipeline.variant import Variant
    from tests.oracle import padded_batch, plain_model, run_plain, tiny_config

    torch.set_num_threads(1)
    get_checkpoint_conversion_mapping("llama")  # it compiles a thousand patterns
    with torch.random.fork_rng(devices=[]):
        for family in ("llama", "marian"):
            config = tiny_config(family)
            model, batch = plain_model(config), padded_batch(config)
            run_plain(model, batch, 2)
            split_step(model, adapter_for(config, torch.float64, "eager"), batch, Variant(2))
        for family, dropout, dtype in product(FAMILIES, (0.0, 0.1, 0.2), (torch.float32, torch.float64)):
            adapter_for(tiny_config(family, dropout=dropout), dtype)


gc.disable()
for name in NAMES:
    with suppress(ImportError):
        importlib.import_module(name)
warm_up()
gc.freeze()
gc.set_threshold(50_000, 20, 10)  # as in conftest.py
gc.enable()
