"""Downloads from the Hub are shown as bytes, by one process of a machine, on a terminal and in a file."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import transformers
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter

from hf_gpipe import progress
from hf_gpipe.checkpoint import weight_files
from hf_gpipe.commands import train
from hf_gpipe.data.hub import asked
from hf_gpipe.libraries.huggingface_hub import Download

SHARD, SIZE, PARTS = "model-00002-of-00002.safetensors", 3_000_000, 4
INDEX = json.dumps({"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors", "b": SHARD}}).encode()
FILES = {"model.safetensors.index.json": INDEX, SHARD: bytes(SIZE), "rows.parquet": bytes(SIZE)}


class Files(BaseHTTPRequestHandler):
    """A repository of the Hub, which sends a file in parts with a pause before each."""

    def do_HEAD(self) -> bytes:
        content = FILES.get(self.path.rpartition("/")[2])
        self.send_response(404 if content is None else 200)
        if content is None:
            self.send_header("X-Error-Code", "EntryNotFound")
        headers = {
            "X-Repo-Commit": "0" * 40,
            "ETag": f'"{abs(hash(self.path))}"',
            "Content-Length": len(content or b""),
        }
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        return content or b""

    def do_GET(self) -> None:
        content = self.do_HEAD()
        size = -(-len(content) // PARTS)
        for start in range(0, len(content), max(size, 1)):
            time.sleep(0.05 if size > 1000 else 0)
            self.wfile.write(content[start : start + size])

    def log_message(self, *args: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in for the Hub; gives an `HfApi` of it, and its cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", SIZE // 10)
    monkeypatch.setattr(progress, "_ELSEWHERE", (0.02, 0.02))
    monkeypatch.setattr(progress, "_TERMINAL", (0.02, 0.02))
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address, cache = f"http://127.0.0.1:{server.server_port}", tmp_path / "cache"

        def cached_file(path: str, name: str, *, tqdm_class: Any = None, **options: Any) -> str | None:
            try:
                return hf_hub_download(path, name, endpoint=address, cache_dir=cache, tqdm_class=tqdm_class)
            except EntryNotFoundError:
                return None

        monkeypatch.setattr(weight_files, "cached_file", cached_file)
        yield partial(HfApi, endpoint=address), cache
        server.shutdown()


def downloaded() -> list[Path]:
    return weight_files.weight_files("owner/name", lambda name: name == "b")


@pytest.mark.usefixtures("hub")
def test_the_weights_of_a_stage_are_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    """A command was silent for as long as the download of its model took."""
    (file,) = downloaded()
    assert (file.name, file.stat().st_size) == (SHARD, SIZE)
    output = capsys.readouterr().err
    lines = output.splitlines()
    assert "\r" not in output
    assert len(lines) >= 2
    assert all(line.startswith(f"downloading {SHARD}: ") and "/3.00M" in line for line in lines)
    assert "100%" in lines[-1]
    assert (len(downloaded()), capsys.readouterr().err) == (1, ""), "it is in the cache"


@pytest.mark.usefixtures("hub")
def test_they_are_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    downloaded()
    assert terminal.getvalue().count(f"\rdownloading {SHARD}: ") >= 2
    assert "\n" not in terminal.getvalue()


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("is_asked_to_be_silent", [False, True])
def test_the_other_processes_of_a_machine_are_silent(
    is_asked_to_be_silent: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every process of a script had a bar of its own, and they wrote over each other."""
    monkeypatch.setenv("LOCAL_RANK", "0" if is_asked_to_be_silent else "1")
    if is_asked_to_be_silent:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    assert len(downloaded()) == 1
    assert capsys.readouterr().err == ""


def test_a_download_by_xet_is_shown_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Xet has two bars, for the bytes that come and for those that are written."""
    monkeypatch.setattr(progress, "_ELSEWHERE", (0.001, 0.001))
    options = {"tqdm_class": Download, "total": 2000, "log_level": logging.WARNING, "name": "huggingface_hub.xet_get"}
    with XetDownloadProgressReporter(
        reconstruction_desc=f"{SHARD}: reconstructing file", transfer_desc=f"{SHARD}: downloading bytes", **options
    ) as reporter:
        for done in (500, 1000, 2000):
            time.sleep(0.01)
            rates = {"total_bytes_completion_rate": 1.0, "total_transfer_bytes_completion_rate": 1.0}
            counts = {"total_bytes_completed": done // 2, "total_transfer_bytes_completed": done, "total_bytes": 2000}
            reporter.update_progress(SimpleNamespace(**counts, **rates))
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("|")[0] for line in lines[:3]] == [f"downloading {SHARD}: {n:3}%" for n in (25, 50, 100)]
    assert "2.00k/2.00k" in lines[-1]


def test_a_data_set_is_shown_too(hub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """`datasets` downloads by huggingface_hub, whose bar is off where stderr is a file."""
    (api, cache), download = hub, HfApi.hf_hub_download
    of_data, names = {"repo_type": "dataset", "cache_dir": cache}, ("owner/rows", "rows.parquet")
    file = asked("owner/rows", None, lambda: api().hf_hub_download(*names, **of_data))
    assert os.path.getsize(file) == SIZE
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert all(line.startswith("downloading rows.parquet: ") for line in lines)
    assert HfApi.hf_hub_download is download


def test_short_work_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.progress(range(100), "reading rows.jsonl", "rows")) == list(range(100))
    assert capsys.readouterr().err == ""


def test_the_command_hides_the_bars_of_small_files_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It turned off all bars of huggingface_hub in its environment, which nothing can turn on again."""
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    train._be_quiet()
    assert "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ
    try:
        train._hide_bars()
        assert huggingface_hub.utils.are_progress_bars_disabled()
    finally:
        transformers.logging.enable_progress_bar()
