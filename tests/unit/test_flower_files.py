"""`fairvar flower new` and `fairvar flower keys`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

import fairvar as fv
from fairvar.cli import main
from fairvar.deploy.flower import new_app
from fairvar.deploy.flower.keys import make_keys

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_app"


def test_the_example_is_what_the_command_writes(tmp_path: Path) -> None:
    written = new_app(tmp_path / "flower_app")
    assert len(written) == 7
    for path in written:
        assert path.read_text() == (EXAMPLE / path.relative_to(tmp_path / "flower_app")).read_text()


@pytest.mark.parametrize("name", ["My_App", "my-app", "1app", "a" * 33, ".."])
def test_names_that_flower_or_python_refuse(name: str, tmp_path: Path) -> None:
    with pytest.raises(fv.BadInput, match="cannot name an app"):
        new_app(tmp_path / name)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["class", "json", "fairvar", "torch"])
def test_an_app_never_hides_a_module(name: str, tmp_path: Path) -> None:
    with pytest.raises(fv.BadInput, match="means something else in Python"):
        new_app(tmp_path / name)
    assert not any(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["flower", "new", str(tmp_path / "my_app")])
    main(["flower", "keys", str(tmp_path / "keys"), "--nodes", "1", "--host", "localhost"])
    before = (tmp_path / "keys" / "ca.key").read_bytes()
    assert "node-0.pub" in capsys.readouterr().out
    for command in (["new", str(tmp_path / "my_app")],
                    ["keys", str(tmp_path / "keys"), "--nodes", "1", "--host", "a"]):  # fmt: skip
        with pytest.raises(SystemExit) as stopped:
            main(["flower", *command])
        assert stopped.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert (tmp_path / "keys" / "ca.key").read_bytes() == before


def test_keys_fit_together(tmp_path: Path) -> None:
    files = make_keys(tmp_path / "keys", 3, ["fl.example.org", "10.0.0.7"], days=30)
    assert len(files) == 10
    for path in files:
        private = path.suffix == ".key" or path.name in {"node-0", "node-1", "node-2"}
        assert path.stat().st_mode & 0o777 == (0o600 if private else 0o644), path
    read = {p.name: p.read_bytes() for p in files}
    root, server = (x509.load_pem_x509_certificate(read[n]) for n in ("ca.crt", "server.pem"))
    server.verify_directly_issued_by(root)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    # The machine's own addresses too: a SuperLink on 0.0.0.0 starts the ServerApp with 127.0.0.1.
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    found = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    assert found == ["10.0.0.7", "127.0.0.1", "::1"]
    assert load_pem_private_key(read["server.key"], None).public_key() == server.public_key()
    for number in range(3):
        key = load_ssh_private_key(read[f"node-{number}"], None)
        assert key.public_key() == load_ssh_public_key(read[f"node-{number}.pub"])


@pytest.mark.parametrize("host", ["ü", "", "a b", "a..b", "a\nb", "\udcff", "-" * 254])
def test_names_that_no_certificate_holds(host: str, tmp_path: Path) -> None:
    with pytest.raises(fv.BadInput, match="give an ASCII name"):
        make_keys(tmp_path / "keys", 1, ["fl.example.org", host])
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize(("nodes", "hosts", "days"), [(0, ["a"], 1), (1, [], 1), (1, ["a"], 0)])
def test_impossible_keys(nodes: int, hosts: list[str], days: int, tmp_path: Path) -> None:
    with pytest.raises(fv.BadInput, match="at least one"):
        make_keys(tmp_path / "keys", nodes, hosts, days)
