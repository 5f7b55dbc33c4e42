"""Changes a line of the package, to see that a test notices. For processes of their own."""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap
from typing import Any


def mutate(target: Any, old: str, new: str) -> None:
    """Replace a text in a function or class, which must have it once, and use the result wherever it was imported."""
    source = textwrap.dedent(inspect.getsource(target))
    assert source.count(old) == 1, f"{target.__qualname__} has {old!r} {source.count(old)} times: mend the mutant"
    scope = dict(vars(sys.modules[target.__module__]))
    flags = __future__.annotations.compiler_flag
    exec(compile(source.replace(old, new), f"<mutant of {target.__qualname__}>", "exec", flags), scope)
    for name, module in list(sys.modules.items()):
        if name.startswith("hf_gpipe") and vars(module).get(target.__name__) is target:
            setattr(module, target.__name__, scope[target.__name__])
