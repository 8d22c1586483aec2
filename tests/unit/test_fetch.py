"""Downloads against a local server that misbehaves in every way of quality.md B3."""

from __future__ import annotations

import errno
import hashlib
import http.server
import importlib
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from fairvar.data.sources import SOURCES
from fairvar.errors import BadInput, RunFailed

module = importlib.import_module("fairvar.data.fetch")
CONTENT = bytes(range(256)) * 4000  # 1 MB
SIZE = len(CONTENT)
FILE = "set.bin"


class Server(http.server.ThreadingHTTPServer):
    """Behaves as the next entry of `script` says; after its end, well."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[str] = []
        self.requests: list[str | None] = []  # the Range header of each
        self.let_go = threading.Event()

    def handle_error(self, request, client_address):
        """The client hangs up on purpose."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.server.requests.append(self.headers.get("Range"))
        way = self.server.script.pop(0) if self.server.script else "good"
        getattr(self, way)()

    def head(self, code=200, length=SIZE, **headers):
        self.send_response(code)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def good(self):
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        if start:
            span = f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"
            self.head(206, len(CONTENT) - start, Content_Range=span)
        else:
            self.head()
        self.wfile.write(CONTENT[start:])

    def no_ranges(self):
        self.head()
        self.wfile.write(CONTENT)

    def stall(self):
        self.head()
        self.wfile.write(CONTENT[:1000])
        self.wfile.flush()
        self.server.let_go.wait(20)

    def reset(self):
        self.head()
        self.wfile.write(CONTENT[:300_000])
        self.wfile.flush()
        time.sleep(0.05)
        option = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
        self.connection.close()

    def cut(self):
        self.head()
        self.wfile.write(CONTENT[:500_000])

    def not_found(self):
        self.send_error(404)

    def broken(self):
        self.send_error(500)

    def to_http(self):
        self.head(302, 0, Location=f"http://127.0.0.1:{self.server.server_port}/other")

    def to_file(self):
        self.head(302, 0, Location="file:///etc/hostname")

    def wrong_length(self):
        self.head(length=17)
        self.wfile.write(CONTENT[:17])

    def wrong_content(self):
        self.head()
        self.wfile.write(CONTENT[:-1] + b"?")

    def endless(self):
        self.head(length=None)
        for _ in range(1000):
            self.wfile.write(CONTENT)

    def huge(self):
        self.head(length=10**15)
        self.wfile.write(CONTENT)

    def no_such_range(self):
        self.send_error(416)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0.01)
    monkeypatch.setattr(module, "TIMEOUT", 0.3)
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    remote = module.Remote(f"https://example.invalid/{FILE}", len(CONTENT), sha256)
    monkeypatch.setitem(module.REMOTE, "set", (remote,))
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.let_go.set()
        server.shutdown()
        thread.join()


def fetch(server: Server, root: Path, **options) -> Path:
    return module.fetch("set", root, mirror=f"http://127.0.0.1:{server.server_port}/x", **options)


def test_a_good_server(server, tmp_path):
    seen: list[tuple[str, int, int]] = []
    folder = fetch(server, tmp_path / "sets ü", progress=lambda *facts: seen.append(facts))
    assert folder == tmp_path / "sets ü" / "set"
    assert (folder / FILE).read_bytes() == CONTENT
    assert seen[-1] == (FILE, len(CONTENT), len(CONTENT))
    assert not list(folder.glob("*.part"))
    fetch(server, tmp_path / "sets ü")
    assert len(server.requests) == 1  # what is there and right is not fetched again


BAD = ["stall", "reset", "cut", "not_found", "broken", "wrong_length", "wrong_content", "endless",
       "huge"]  # fmt: skip


@pytest.mark.parametrize("way", BAD)
def test_a_bad_server_is_given_three_attempts(server, tmp_path, way):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / FILE).write_bytes(b"damaged, but all there is")
    server.script = [way] * 5
    with pytest.raises(RunFailed, match="in 3 attempts") as error:
        fetch(server, tmp_path)
    assert error.value.exit_code == 3
    assert "\n" not in str(error.value)
    assert len(server.requests) == 3
    assert (tmp_path / "set" / FILE).read_bytes() == b"damaged, but all there is"
    part = tmp_path / "set" / f"{FILE}.part"
    assert not part.exists() or part.stat().st_size <= len(CONTENT)


@pytest.mark.parametrize("way", BAD)
def test_one_bad_attempt_does_not_matter(server, tmp_path, way):
    server.script = [way]
    assert (fetch(server, tmp_path) / FILE).read_bytes() == CONTENT
    assert len(server.requests) == 2


@pytest.mark.parametrize("way", ["to_http", "to_file"])
def test_redirects_to_anything_but_https_are_refused(server, tmp_path, way):
    server.script = [way] * 3
    with pytest.raises(RunFailed, match=r"only https is followed|not allowed|in 3 attempts"):
        fetch(server, tmp_path)
    assert not (tmp_path / "set" / FILE).exists()
    assert len(server.requests) <= 3


def test_a_broken_download_goes_on_where_it_stopped(server, tmp_path):
    server.script = ["cut"]
    fetch(server, tmp_path)
    assert server.requests == [None, "bytes=500000-"]


def test_a_server_without_ranges_starts_again(server, tmp_path):
    server.script = ["cut", "no_ranges"]
    assert (fetch(server, tmp_path) / FILE).read_bytes() == CONTENT


def test_a_part_of_another_file_is_found_by_the_checksum(server, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / f"{FILE}.part").write_bytes(b"x" * 1000)
    assert (fetch(server, tmp_path) / FILE).read_bytes() == CONTENT
    assert server.requests == ["bytes=1000-", None]


def test_a_part_that_is_too_long_is_dropped(server, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / f"{FILE}.part").write_bytes(b"x" * (len(CONTENT) + 5))
    server.script = ["no_such_range"]
    assert (fetch(server, tmp_path) / FILE).read_bytes() == CONTENT


def test_two_at_once(server, tmp_path):
    (tmp_path / "set").mkdir()
    with FileLock(tmp_path / "set" / ".lock"), pytest.raises(RunFailed, match="another process"):
        fetch(server, tmp_path)
    fetch(server, tmp_path)


def test_nobody_there(server, tmp_path):
    with pytest.raises(RunFailed, match="no connection"):
        module.fetch("set", tmp_path, mirror="http://127.0.0.1:9")


@pytest.mark.parametrize("mirror", ["http://example.invalid", "ftp://127.0.0.1", "file:///etc"])
def test_other_addresses_than_https_are_refused(server, tmp_path, mirror):
    with pytest.raises(BadInput, match="https://"):
        module.fetch("set", tmp_path, mirror=mirror)


def test_a_full_disk(server, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(RunFailed, match="No space left"):
        fetch(server, tmp_path)
    assert not (tmp_path / "set" / FILE).exists()


def test_bad_requests(server, tmp_path):
    with pytest.raises(BadInput, match="did you mean 'cifar10'"):
        module.fetch("cifar1", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot write into"):
        fetch(server, tmp_path / "file")
    assert not server.requests


def test_the_table_is_complete():
    assert set(module.REMOTE) == set(SOURCES) - {"folder", "npz"}
    for remotes in module.REMOTE.values():
        for remote in remotes:
            assert remote.url.startswith("https://")
            assert len(remote.sha256) == 64
            assert 0 < remote.size < 300e6
