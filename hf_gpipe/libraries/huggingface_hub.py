"""How huggingface_hub shows its downloads: its own bars are for one process and a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

from huggingface_hub import HfApi, constants

from hf_gpipe.progress import Progress


class Download(Progress):
    """The bytes of a file that is downloaded: huggingface_hub makes one of it, given as `tqdm_class`.

    The first process of each machine shows what it downloads; others wait, or download without a word.
    """

    def __init__(self, *, desc: str, total: int | None = None, initial: int = 0, **options: Any) -> None:
        path, _, what = desc.partition(": ")  # perhaps the end of an address
        # With Xet a second one counts the bytes that are written.
        is_hidden = what == "reconstructing file" or os.environ.get("LOCAL_RANK", "0") != "0"
        is_hidden |= bool(constants.HF_HUB_DISABLE_PROGRESS_BARS)
        name = path.rpartition("/")[2]
        super().__init__(desc=f"downloading {name}", total=total, initial=initial, unit="B", disable=is_hidden)


@contextmanager
def showing_downloads() -> Iterator[None]:
    """Context manager in which `Download` shows what other libraries download."""
    download = HfApi.hf_hub_download
    HfApi.hf_hub_download = partialmethod(download, tqdm_class=Download)  # type: ignore[assignment, method-assign]  # for a time
    try:
        yield
    finally:
        HfApi.hf_hub_download = download  # type: ignore[method-assign]  # as it was
