"""Loading of weight files into a model.

`.safetensors` files are read by their library, `.pth` and `.pt` files by `torch.load` with its
restricted unpickler (`weights_only`). Known holes of that unpickler were mended in torch 2.6
(CVE-2025-32434) and 2.10 (CVE-2026-24747), which is why pyproject.toml asks for 2.10 or newer.
Before torch reads the file, the sizes in its zip table are checked, so that a small file cannot
fill the memory. Afterwards it is checked that the file holds only plain tensors.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load as parse_safetensors
from torch import Tensor, nn

from fairvar.common.files import MOST_TENSORS, read_bytes
from fairvar.common.tree import Tree
from fairvar.errors import BadInput, IntegrityError, one_line

MOST_INDEX_BYTES = 2 << 20  # of the pickle or the header that lists the tensors
MOST_ENTRIES = 100_000  # of a zip
CHECKSUM = "sha256"  # in the metadata of a model's file
WEIGHT_FILES = (".safetensors", ".pth", ".pt")
ADVICE = re.compile(r"Weights only load failed|Please file|\(\d\) |Check the documentation")
ZIP_START = b"PK\3\4"
ZIP_ENTRY = b"PK\1\2"


def load_weights(
    module: nn.Module,
    path: str | Path,
    sha256: str | None = None,
    strict: bool = True,
    skip: Sequence[str] = (),
) -> list[str]:
    """Copies the tensors of a weight file into `module` and returns the names of those loaded.

    Tensors whose names begin with one of `skip` are not loaded: for another number of classes give
    `skip=("classifier.1.",)`. `strict=False` allows names that are missing on either side, but no
    other shapes. After an error, nothing was copied.
    """
    path = Path(path)
    tensors = read_tensors(path, sha256)
    own = module.state_dict()
    for prefix in skip:
        if not any(name.startswith(prefix) for name in (*own, *tensors)):
            raise BadInput(
                f"skip={prefix!r} is the beginning of no name in {path.name} or the model"
            )
    tensors = {name: t for name, t in tensors.items() if not name.startswith(tuple(skip))}
    own = {name: t for name, t in own.items() if not name.startswith(tuple(skip))}
    if strict and tensors.keys() != own.keys():
        raise BadInput(
            f"{path.name} does not fit the model: {_names('missing', own.keys() - tensors.keys())}"
            f" and {_names('unknown', tensors.keys() - own.keys())}; see skip= and strict="
        )
    common = [name for name in own if name in tensors]
    if not common:
        raise BadInput(f"{path.name} has no tensor of this model: it is for another one")
    for name in common:
        _check_fits(path, name, tensors[name], own[name])
    with torch.no_grad():
        for name in common:
            own[name].copy_(tensors[name])
    return common


def read_tensors(path: str | Path, sha256: str | None = None) -> Tree:
    """The tensors of a `.safetensors`, `.pth` or `.pt` file by name.

    The file is read once, so that the bytes with the right checksum are the bytes that are used.
    """
    path = Path(path)
    try:
        data = read_bytes(path, MOST_TENSORS)
    except OSError as error:
        raise BadInput(f"cannot read weights {path.name}: {error.strerror}") from None
    if sha256 is not None:
        found = hashlib.sha256(data).hexdigest()
        if found != sha256.lower():
            raise IntegrityError(f"{path.name} has SHA-256 {found}, not {sha256}: fetch it again")
    if path.suffix == WEIGHT_FILES[0]:
        return _read_safetensors(path.name, data)
    if path.suffix in WEIGHT_FILES:
        return _read_torch(path.name, data)
    raise BadInput(f"{path.name}: weight files end in {', '.join(WEIGHT_FILES)}")


def checksum(tensors: Tree) -> str:
    """The SHA-256 of names, types, shapes and values, which `History.save_model` writes beside the
    tensors and every reader of the file compares."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        leaf = tensors[name].contiguous()
        found.update(f"{name} {leaf.dtype} {tuple(leaf.shape)}\n".encode())
        found.update(leaf.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _names(what: str, names: set[str]) -> str:
    shown = ", ".join(repr(name[:80]) for name in sorted(names)[:3])
    more = ", …" if len(names) > 3 else ""
    return f"{len(names)} {what}" + (f" ({shown}{more})" if names else "")


def _check_fits(path: Path, name: str, new: Tensor, old: Tensor) -> None:
    if new.shape != old.shape:
        raise BadInput(
            f"{path.name}: {name} has shape {tuple(new.shape)}, the model's is {tuple(old.shape)}; "
            f"to keep the model's own pass skip=({name.rpartition('.')[0] + '.'!r},)"
        )
    if new.is_floating_point() != old.is_floating_point() or new.is_complex() or old.is_complex():
        raise BadInput(f"{path.name}: {name} is {new.dtype}, the model's is {old.dtype}")
    if new.is_floating_point() and not bool(torch.isfinite(new).all()):
        raise IntegrityError(f"{path.name}: {name} holds values that are not finite")


def _read_safetensors(file: str, data: bytes) -> Tree:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(MOST_INDEX_BYTES, len(data) - 8):
        raise IntegrityError(f"{file} is cut off or no safetensors file")
    try:
        # The library keeps the last of two equal names; a file with two is forged.
        names = json.loads(data[8 : 8 + length], object_pairs_hook=lambda pairs: pairs)
        if isinstance(names, list) and len({name for name, _ in names}) < len(names):
            raise IntegrityError(f"{file} names a tensor twice")
        tensors = parse_safetensors(data)
        written = dict(dict(names).get("__metadata__", [])).get(CHECKSUM)
        if written not in (None, checksum(tensors)):
            raise IntegrityError(f"{file} is damaged: its tensors are not those that were written")
        return tensors
    except (safetensors.SafetensorError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise IntegrityError(f"{file} is no valid safetensors file: {_short(error)}") from None


def _short(error: Exception) -> str:
    """What another library found wrong, without torch's advice to switch its checks off."""
    lines = [
        line.strip().removeprefix("WeightsUnpickler error: ") for line in str(error).split("\n")
    ]
    found = next((line for line in lines if line and not ADVICE.match(line)), type(error).__name__)
    return one_line(found.partition(". Please")[0].partition(". This is an internal")[0])[:160]


def _refused(file: str, why: str) -> IntegrityError:
    return IntegrityError(f"{file} is refused: {why}")


def _read_torch(file: str, data: bytes) -> Tree:
    _check_zip(file, data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other versions of pickle's protocol
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises nearly anything on damaged files
        raise IntegrityError(f"{file} is refused by torch: {_short(error)}") from None
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    ):
        raise _refused(file, "it is not a flat dict of tensors; save model.state_dict() alone")
    for name, tensor in found.items():
        if not _is_plain(tensor):
            raise _refused(file, f"{name[:80]!r} is no plain tensor, or reaches past its storage")
    return {name: tensor.detach() for name, tensor in found.items()}


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is a dense CPU tensor within its storage: a stride of 0 could make it larger than
    its file."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_quantized or tensor.dim() > 16:
        return False
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        return False
    held = tensor.untyped_storage().nbytes()
    return (tensor.storage_offset() + tensor.numel()) * tensor.itemsize <= held


def _check_zip(file: str, data: bytes) -> None:
    """Refuse zips whose table claims more bytes than the file has, or compressed entries, which
    torch would unpack: both could fill the memory. torch itself writes uncompressed entries."""
    if not data.startswith(ZIP_START):
        raise IntegrityError(f"{file} is no intact zip file of weights: files from before torch "
                             "1.6 must be saved again as safetensors")  # fmt: skip
    if data.count(ZIP_ENTRY) > MOST_ENTRIES:
        raise _refused(file, f"the zip has more than {MOST_ENTRIES} entries")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            doubled = len(entries) < len(archive.infolist())
    except Exception as error:  # zipfile raises nearly anything on damaged files
        raise IntegrityError(f"{file} is no intact zip file of weights ({_short(error)})") from None
    if doubled or len({name.partition("/")[0] for name in entries}) != 1:
        raise _refused(file, "the zip has two equal names or several folders")
    for name, entry in entries.items():
        if {"..", ""} & set(name.split("/")) or "\\" in name:
            raise _refused(file, f"the zip has an entry with the path {name[:80]!r}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise _refused(file, f"the zip's entry {name[:80]!r} is compressed or encrypted")
        if name.endswith("data.pkl") and entry.file_size > MOST_INDEX_BYTES:
            raise _refused(file, "its list of tensors is too long")
    if sum(entry.file_size for entry in entries.values()) > len(data):
        raise _refused(file, "its entries claim more bytes than the file has")
