"""The private and undocumented names of datasets."""

from __future__ import annotations

from typing import Any


def fingerprint_of(rows: Any) -> str:
    """A text that changes when a dataset has other rows, or was made by other functions."""
    fingerprint: str = rows._fingerprint
    return fingerprint


def cache_folders() -> tuple[str, str, str]:
    """The folders in which the library keeps what it prepared, extracted and downloaded."""
    from datasets import config  # it takes half a second, and only the main process prepares data

    return str(config.HF_DATASETS_CACHE), str(config.EXTRACTED_DATASETS_PATH), str(config.DOWNLOADED_DATASETS_PATH)
