"""Safetensors files read from disk piece by piece; `SafetensorsLayout` has the format."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from heterorl.common.errors import CorruptStore

INDEX_FILE = "model.safetensors.index.json"
TYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8, "I64": torch.int64,
    "I32": torch.int32, "BOOL": torch.bool,
}  # fmt: skip
"""Types that are written, by their names in the format."""
TYPE_NAMES = {dtype: name for name, dtype in TYPES.items()}
_STORED = {torch.float32: "<f4", torch.bfloat16: "<i2", torch.float16: "<i2", torch.uint8: "u1"}


class TensorFile:
    """A file's types and shapes, and each tensor on request."""

    def __init__(self, path: Path) -> None:
        """Read and check the header.
        Raises CorruptStore: the file is missing or broken."""
        self._path = path
        try:
            with safe_open(path, "pt") as file:
                # Meta tensors: only type and shape are checked.
                self.tensors = {
                    name: torch.empty(part.get_shape(), dtype=_dtype(part.get_dtype()), device="meta")
                    for name in file.keys()  # noqa: SIM118 - not a dictionary
                    for part in [file.get_slice(name)]
                }
            with path.open("rb") as raw:
                length = int.from_bytes(raw.read(8), "little")
                header = json.loads(raw.read(length))
        except (OSError, ValueError, SafetensorError) as error:
            raise CorruptStore(f"{path} cannot be read: {error}") from error
        self._offsets = {name: 8 + length + header[name]["data_offsets"][0] for name in self.tensors}

    def flat(self, name: str) -> torch.Tensor:
        """A flattened tensor of the file's type, mapped from the disk.

        It is not to be written to. Pages are read on use, and freed with the last reference.

        Raises CorruptStore: the file is gone, or shorter than its header says.
        """
        meta = self.tensors[name]
        if not meta.numel():
            return torch.empty(0, dtype=meta.dtype)
        # Copy on write: torch takes writable arrays only, and writes do not reach the file.
        try:
            mapped = np.memmap(
                self._path, _STORED[meta.dtype], mode="c", offset=self._offsets[name], shape=(meta.numel(),)
            )
        except (OSError, ValueError) as error:
            raise CorruptStore(f"{self._path} cannot be read: {error}") from error
        return torch.from_numpy(mapped).view(meta.dtype)


def _dtype(name: str) -> torch.dtype:
    # float64 stands for all other types, and is refused by name.
    return TYPES[name] if TYPES.get(name) in _STORED else torch.float64


def weight_files(model_dir: str) -> list[Path]:
    """The safetensors files of a local directory or hub id.
    There are none where the weights have another form.

    Raises:
        OSError: the index cannot be read, or a file that it names is missing.
        ValueError: the index is not valid.
    """
    single = _find(model_dir, "model.safetensors")
    if single is not None:
        return [single]
    index = _find(model_dir, INDEX_FILE)
    if index is None:
        return []
    table = json.loads(index.read_text(encoding="utf-8"))
    try:
        names = sorted(set(table["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of weights: {error!r}") from error
    paths = [_find(model_dir, name) for name in names if Path(name).name == name]
    found = [path for path in paths if path is not None]
    if len(found) != len(names):
        raise FileNotFoundError(f"{index} names files that are not there")
    return found


def _find(model_dir: str, name: str) -> Path | None:
    directory = Path(model_dir)
    if directory.is_dir():
        return directory / name if (directory / name).is_file() else None
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(model_dir, name)
    except OSError:
        return None
    return None if found is None else Path(found)
