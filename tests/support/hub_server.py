"""A small server with the part of the Hugging Face hub's HTTP interface that downloads use."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": "a" * 40})
    """Branch or tag -> commit."""
    token: str | None = None
    """The token that a private repository requires."""
    gated: bool = False


class HubServer:
    """`with HubServer() as hub: hub.repositories["a/b"] = Repository(files)`; `hub.endpoint` is its address."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        """(method, path, headers in lower case) of each request, in order."""
        self.cut_after: int | None = None
        """The connection is closed after this many bytes of a weight file's body."""
        self.hold_after: int | None = None
        """A weight file's body pauses after this many bytes until `go` is set."""
        self.hold_only = ""
        """Limits this to files with this suffix; other weight files are sent once such a body has paused."""
        self.go = threading.Event()
        self.paused = threading.Event()
        """Set once a body has paused."""
        self.ranges = True
        """False: a server that ignores range requests."""
        self.elsewhere: HubServer | None = None
        """Where weight files are redirected to, as the hub redirects to its CDN."""
        self.status: int | None = None
        """The status of every response."""
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, model: str, folder: Path, **settings: Any) -> Repository:
        """Adds a folder's files as a repository."""
        files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        self.repositories[model] = Repository(files, **settings)
        return self.repositories[model]

    def fetched(self, ending: str = "") -> list[str]:
        """Paths of the sent files, optionally only those with a suffix."""
        return [path for method, path, _ in self.requests if method == "GET" and path.endswith(ending)]

    def close(self) -> None:
        self.go.set()
        self.paused.set()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> HubServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: HubServer

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server_hub
        path = urlsplit(self.path).path
        headers = {name.lower(): value for name, value in self.headers.items()}
        hub.requests.append((self.command, unquote(path), headers))
        parts = [unquote(part) for part in path.strip("/").split("/")]  # a revision may contain slashes
        api = parts[:2] == ["api", "models"]
        owner, name, _, revision, *file = [*(parts[2:] if api else parts), "", "", "", ""]
        repository = hub.repositories.get(f"{owner}/{name}")
        if (refusal := self._refusal(repository, revision, headers)) is not None:
            self._answer(*refusal)
            return
        assert repository is not None
        commit = repository.revisions.get(revision, revision)
        if api:
            siblings = [{"rfilename": file} for file in sorted(repository.files)]
            body = json.dumps({"id": f"{owner}/{name}", "sha": commit, "siblings": siblings}).encode()
            self._answer(200, {"Content-Type": "application/json"}, body)
        else:
            self._file(repository, commit, "/".join(file).rstrip("/"), headers)

    def _refusal(
        self, repository: Repository | None, revision: str, headers: dict[str, str]
    ) -> tuple[int, dict[str, str]] | None:
        known = "authorization" in headers
        if self.server_hub.status is not None:
            return self.server_hub.status, {}
        if repository is None:
            # As on the hub, callers without a token cannot tell a private repository from a missing one.
            return 404 if known else 401, {"X-Error-Code": "RepoNotFound"}
        if repository.token is not None and headers.get("authorization") != f"Bearer {repository.token}":
            wrong = {"X-Error-Message": "Invalid credentials in Authorization header"}
            return 401, wrong if known else {"X-Error-Code": "RepoNotFound"}
        if repository.gated:
            return 403, {"X-Error-Code": "GatedRepo"}
        if revision not in repository.revisions and revision not in repository.revisions.values():
            return 404, {"X-Error-Code": "RevisionNotFound"}
        return None

    def _file(self, repository: Repository, commit: str, file: str, headers: dict[str, str]) -> None:
        hub = self.server_hub
        content = repository.files.get(file)
        common = {"X-Repo-Commit": commit}
        if content is None:
            self._answer(404, {**common, "X-Error-Code": "EntryNotFound"})
            return
        weights = file.endswith(".safetensors")
        digest = hashlib.sha256(content).hexdigest() if weights else hashlib.sha1(content).hexdigest()
        common |= {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        if weights:
            common |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
            if hub.elsewhere is not None:
                self._answer(302, {**common, "Location": hub.elsewhere.endpoint + self.path})
                return
        status, start = 200, 0
        if (asked := headers.get("range")) and hub.ranges:
            status, start = 206, int(asked.removeprefix("bytes=").rstrip("-"))
            common["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = hub.cut_after if weights else None
        hold = hub.hold_after if weights and file.endswith(hub.hold_only) else None
        if weights and self.command == "GET" and hub.hold_after is not None and hold is None:
            hub.paused.wait()
        self._answer(status, common, content[start:], cut, hold)

    def _answer(
        self, status: int, headers: dict[str, str] | None = None, body: bytes = b"", cut: int | None = None,
        hold: int | None = None,
    ) -> None:  # fmt: skip
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")  # so that no connection is answered after the hub has been closed
        self.end_headers()
        if self.command == "HEAD":
            return
        if hold is not None:
            self.wfile.write(body[:hold])
            self.server_hub.paused.set()
            self.server_hub.go.wait()
            body = body[hold:]
        self.wfile.write(body if cut is None else body[:cut])
