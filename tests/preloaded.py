"""The imports of the process that tests fork (tests/gloo.py): most of those of its children; models load on first use.

The garbage collector leaves out what is imported: else each child looks at a million objects of others, and gets pages
of its own for them.
"""

import gc
import importlib
from contextlib import suppress

NAMES = (
    *("hf_gpipe.training.job", "hf_gpipe.planner.decide", "tests.oracle", "tests.training.toy", "scripts.forked"),
    *("pytest", "hypothesis", "matplotlib.backends.backend_agg", "sacrebleu", "sacrebleu.tokenizers.tokenizer_13a"),
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("bart", "llama", "m2m_100", "marian", "mixtral", "t5")
    ),
)

gc.disable()
for name in NAMES:
    with suppress(ImportError):
        importlib.import_module(name)
gc.freeze()
gc.enable()
