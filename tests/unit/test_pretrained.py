"""Pretrained weights fill all but the last layer; their checksum, not their path, names the run."""

from __future__ import annotations

import hashlib

import pytest
import torch
from safetensors.torch import save_file

from fairvar import BadInput, IntegrityError
from fairvar.engine.keys import fingerprint
from fairvar.models import build
from fairvar.runs.config import Config
from fairvar.runs.runner import federation_of, model_of, start_note

SMALL = {"data": {"name": "digits", "clients": 4}}


def stored(path) -> str:
    module = build("2nn", (1, 8, 8), 7, seed=5)  # another number of classes than the digits
    save_file(module.state_dict(), path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def config(path, digest: str, **model: str) -> Config:
    section = {"name": "2nn", "weights": str(path), "weights_sha256": digest, **model}
    return Config.from_dict({**SMALL, "model": section})


def test_all_but_the_last_layer_come_from_the_file(tmp_path):
    path = tmp_path / "w.safetensors"
    digest = stored(path)
    module = model_of(settings := config(path, digest), federation_of(settings))
    source = build("2nn", (1, 8, 8), 7, seed=5).state_dict()
    names = list(module.state_dict())
    last = names[-1].rsplit(".", 1)[0]
    for name, leaf in module.state_dict().items():
        if not name.startswith(last + "."):
            assert torch.equal(leaf, source[name]), name
    assert module.state_dict()[names[-1]].shape == (10,)
    assert digest[:12] in str(start_note(settings))


def test_the_file_must_be_the_one_that_was_named(tmp_path):
    path = tmp_path / "w.safetensors"
    stored(path)
    settings = config(path, "0" * 64)
    with pytest.raises(IntegrityError, match=r"w\.safetensors"):
        model_of(settings, federation_of(settings))
    with pytest.raises(BadInput, match="weights_sha256"):
        Config.from_dict({**SMALL, "model": {"name": "2nn", "weights": str(path)}})


def test_the_path_does_not_name_the_run(tmp_path):
    digest = stored(tmp_path / "w.safetensors")
    here, there = (config(tmp_path / name, digest) for name in ("w.safetensors", "moved"))
    assert fingerprint(here) == fingerprint(there)
    assert fingerprint(here) != fingerprint(Config.from_dict({**SMALL, "model": {"name": "2nn"}}))


def test_from_scratch_is_said():
    note = start_note(Config.from_dict({"model": {"name": "mobilenet_v2"}}))
    assert note is not None
    assert "from scratch" in note
    assert start_note(Config.from_dict({})) is None
