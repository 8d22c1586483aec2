"""Downloads from the official addresses: https only, checked by SHA-256, resumable.

Nothing else in fairvar uses the network. The size of every file is known, so a server can neither
fill the disk nor send a shorter file; a file with another SHA-256 is deleted.
"""

from __future__ import annotations

import errno
import http.client
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fairvar.common.files import digest, given_path, open_regular
from fairvar.data.readers.arrays import IDX_FILES
from fairvar.errors import BadInput, RunFailed, cause, unknown

Progress = Callable[[str, int, int], None]  # file, bytes so far, bytes in all

ATTEMPTS = 3
PAUSE = 1.0  # seconds before the second attempt; doubled before the third
TIMEOUT = 30.0  # seconds without a byte
PIECE = 1 << 16
MOST_BYTES = 64 << 30


@dataclass(frozen=True)
class Remote:
    """One file: its address, its size in bytes and its SHA-256."""

    url: str
    size: int
    sha256: str

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"  # the original host has no https
_FASHION = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_CHARACTERS = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"


def _idx(folder: str, *facts: tuple[int, str]) -> tuple[Remote, ...]:
    files = zip(IDX_FILES, facts, strict=True)
    return tuple(Remote(f"{folder}{file}.gz", *of) for file, of in files)


# fmt: off
REMOTE: dict[str, tuple[Remote, ...]] = {
    "mnist": _idx(
        _MNIST,
        (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
    "fashion_mnist": _idx(
        _FASHION,
        (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    ),
    "cifar10": (
        Remote(_CIFAR + "cifar-10-binary.tar.gz", 170052171,
               "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),
    ),
    "cifar100": (
        Remote(_CIFAR + "cifar-100-binary.tar.gz", 168513733,
               "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"),
    ),
    "tiny_imagenet": (
        Remote("https://cs231n.stanford.edu/tiny-imagenet-200.zip", 248100043,
               "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821"),
    ),
    "shakespeare": (
        Remote(_CHARACTERS + "input.txt", 1115394,
               "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
    ),
}
# fmt: on


def cache_dir() -> Path:
    """FAIRVAR_CACHE, or the user's cache folder."""
    own = os.environ.get("FAIRVAR_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or given_path("~/.cache")) / "fairvar"


def datasets_dir() -> Path:
    """Where `fairvar data fetch` puts data sets, and the last place they are looked for."""
    return cache_dir() / "datasets"


def file_digest(path: Path) -> str:
    with open_regular(path, MOST_BYTES) as file:
        return digest(file)


def fetch(
    name: str,
    root: str | Path | None = None,
    *,
    progress: Progress | None = None,
    mirror: str | None = None,
) -> Path:
    """Download a data set into `root/name` and return that folder; files already there are kept.

    `root` is a folder of data sets, by default the cache's. `mirror` replaces the address up to
    the file name: https, or http on this machine for tests. Up to three attempts per file.
    """
    if name not in REMOTE:
        raise unknown("data set to download", name, REMOTE)
    folder = (datasets_dir() if root is None else given_path(root)) / name
    urls = {remote: _url(remote, mirror) for remote in REMOTE[name]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=0):
            for remote, url in urls.items():
                if checksum_error(folder / remote.file, remote) is not None:
                    _fetch_file(remote, url, folder / remote.file, progress)
    except Timeout:
        raise RunFailed(f"another process is fetching {name} into {folder}; wait for it") from None
    except OSError as error:
        kind = RunFailed if error.errno == errno.ENOSPC else BadInput
        raise kind(f"cannot write into {folder}: {error.strerror or cause(error)}") from None
    return folder


def checksum_error(path: Path, remote: Remote) -> str | None:
    """What is wrong with a file, or None."""
    if not path.is_file():
        return "it is not there"
    size = path.stat().st_size
    if size != remote.size:
        return f"it has {size} bytes, not {remote.size}"
    return None if file_digest(path) == remote.sha256 else "its SHA-256 is not the published one"


def _url(remote: Remote, mirror: str | None) -> str:
    url = remote.url if mirror is None else f"{mirror.rstrip('/')}/{remote.file}"
    parts = urllib.parse.urlsplit(url)
    local = mirror is not None and parts.scheme == "http" and parts.hostname == "127.0.0.1"
    if parts.scheme != "https" and not local:
        raise BadInput(f"mirror {mirror!r} must begin with https://")
    return url


class _Again(Exception):
    """An attempt failed in a way that another one may not."""


def _fetch_file(remote: Remote, url: str, path: Path, progress: Progress | None) -> None:
    part = path.with_name(f"{path.name}.part")
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE * 2 ** (attempt - 1) if attempt else 0)
        try:
            _download(remote, url, part, progress)
        except _Again as error:
            why = str(error)
            continue
        wrong = checksum_error(part, remote)
        if wrong is None:
            os.replace(part, path)
            return
        part.unlink()
        why = wrong
    raise RunFailed(f"could not fetch {url} in {ATTEMPTS} attempts: {why}; try again later")


def _download(remote: Remote, url: str, part: Path, progress: Progress | None) -> None:
    """Append what is missing to the part file; it stays for the next attempt if that fails."""
    have = part.stat().st_size if part.is_file() else 0
    if have == remote.size:
        return
    headers = {"User-Agent": "fairvar"} | ({"Range": f"bytes={have}-"} if have else {})
    opener = urllib.request.build_opener(_HttpsOnly)
    request = urllib.request.Request(url, headers=headers)  # noqa: S310  # `_url` checked it
    try:
        with opener.open(request, timeout=TIMEOUT) as reply:
            _receive(reply, remote, part, have, progress)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:
            part.unlink(missing_ok=True)
        raise _Again(f"the server answers {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise _Again(f"no connection ({cause(error)})") from None
    except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
        raise _Again(f"the connection broke ({cause(error)})") from None


def _receive(reply: Any, remote: Remote, part: Path, have: int, progress: Progress | None) -> None:
    resumed = reply.headers.get("Content-Range", "").startswith(f"bytes {have}-")
    if reply.status != 206 or not resumed:
        have = 0
    length = reply.headers.get("Content-Length", "")
    if length and (not length.isdigit() or have + int(length[:18]) != remote.size):
        raise _Again(f"the server offers {length[:18]} bytes, not {remote.size - have}")
    with part.open("ab" if have else "wb") as out:
        while piece := reply.read(PIECE):
            have += len(piece)
            if have > remote.size:
                out.truncate(0)
                raise _Again(f"the server sends more than the file's {remote.size} bytes")
            out.write(piece)
            if progress is not None:
                progress(remote.file, have, remote.size)
        out.flush()
        os.fsync(out.fileno())
    if have < remote.size:
        raise _Again(f"the connection ended after {have} of {remote.size} bytes")


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    """Follows redirects to https only, also from a test's own server."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str,
        headers: http.client.HTTPMessage, newurl: str,
    ) -> urllib.request.Request | None:  # fmt: skip
        if not newurl.lower().startswith("https://"):
            fp.close()
            raise RunFailed(f"{req.full_url} redirects to {newurl[:80]!r}; only https is followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
