"""The tensors of a model directory by name, from one safetensors file or from several with an index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from heterorl.learner.backends.loading.tensor_file import TensorFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class Shards:
    """Files that hold one model together; of each tensor no more is read than is used."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read the headers.

        Raises:
            CorruptStore: a file is missing or broken.
        """
        self._files = {name: file for file in map(TensorFile, paths) for name in file.tensors}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def like(self, name: str) -> torch.Tensor:
        """Type and shape, on the meta device; float64 stands for every type that is not fp32, bf16, fp16 or uint8."""
        return self._files[name].tensors[name]

    def flat(self, name: str) -> torch.Tensor:
        """The flattened tensor, mapped from the disk in the type it has there; not to be written to."""
        return self._files[name].flat(name)


def weight_files(model_dir: str) -> list[Path]:
    """The safetensors files of a local directory or hub id; none where it keeps its weights in another form.

    Raises:
        OSError: the index cannot be read, or a file that it names cannot be had.
        ValueError: the index is not one.
    """
    single = _find(model_dir, SINGLE_FILE)
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
