"""As much of the Hub as an upload asks for, at an address of this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar


class Hub(BaseHTTPRequestHandler):
    """Notes the files of each commit."""

    commits: ClassVar[list[set[str]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        address = f"http://127.0.0.1:{self.server.server_port}/me/mine"  # type: ignore[attr-defined]
        answer: dict[str, object] = {"url": address, "name": "me/mine"}
        if "/preupload/" in self.path:
            kept = {"uploadMode": "regular", "shouldIgnore": False}
            answer = {"files": [{"path": one["path"], **kept} for one in json.loads(body)["files"]]}
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            self.commits.append({line["value"]["path"] for line in lines if line["key"] == "file"})
            answer = {"commitUrl": f"{address}/commit/1", "commitOid": "1"}
        self._answer(answer)

    def do_GET(self) -> None:
        self._answer({"id": "me/mine", "sha": "1", "siblings": []})

    def _answer(self, content: object) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        """Nothing is printed."""


@contextmanager
def stand_in_hub() -> Iterator[str]:
    """The address of a stand-in for the Hub, while the block runs."""
    Hub.commits.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
