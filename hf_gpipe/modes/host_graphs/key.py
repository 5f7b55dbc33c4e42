"""Graphs on the host as a mode of a configuration."""

from __future__ import annotations

from hf_gpipe.modes.host_graphs.table import HOST
from hf_gpipe.settings.mode import Keys, Mode


class HostGraphs(Mode):
    """Activations that wait in CPU memory between forward and backward."""

    @classmethod
    def setting(cls) -> str:
        return f"recompute: {HOST}"

    def is_on(self, keys: Keys) -> bool:
        return HOST in (keys["recompute"] or ())


FIELDS = {"host_graphs": (HostGraphs, HostGraphs)}
