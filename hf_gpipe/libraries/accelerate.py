"""The private and undocumented names of accelerate."""

from __future__ import annotations

from typing import Any

from accelerate.utils import recursively_apply as recursively_apply  # a function of each tensor in lists and dicts


def has_hook(module: Any) -> bool:
    """Whether accelerate replaced a module's forward, as `dispatch_model` and `device_map` do."""
    return hasattr(module, "_hf_hook")
