"""The safetensors files of a model, filled run by run while its values are read in the model's own order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import torch
from torch import nn

from heterorl.common.errors import ConfigError
from heterorl.learner.backends.loading.file_plan import FilePlan, name_of_type
from heterorl.learner.backends.loading.shards import INDEX_FILE
from heterorl.learner.exporting.form import Form, Part, revert
from heterorl.learner.exporting.values import Values

Report = Callable[[int, int], None]
"""Told how many bytes are written, of how many."""


class _Files:
    """Files of their full size, and where each tensor lies in which."""

    def __init__(self, directory: Path, form: Form, stack: ExitStack) -> None:
        self._places: dict[str, tuple[BinaryIO, int]] = {}
        for file_name, names in form.files.items():
            # safetensors sorts alike: wide types first, then names.
            order = sorted(names, key=lambda name: (-form.tensors[name].element_size(), name))
            table = [(name, name_of_type(form.tensors[name].dtype), tuple(form.tensors[name].shape)) for name in order]
            plan = FilePlan(table, metadata={"format": "pt"})
            file = stack.enter_context((directory / file_name).open("wb"))
            file.write(plan.header)
            file.truncate(plan.num_bytes)
            self._places |= {name: (file, plan.place(name)) for name in names}

    def write(self, name: str, offset: int, values: torch.Tensor) -> int:
        """Write a run of a tensor that begins at a byte of it; returns the number of its bytes."""
        file, place = self._places[name]
        data = values.contiguous().view(torch.uint8).numpy().data if values.numel() else b""
        file.seek(place + offset)
        file.write(data)
        return len(data)


def write_weights(directory: Path, form: Form, values: Values, *, model: nn.Module, report: Report) -> None:
    """Write the files and, where they are several, their index.

    Args:
        directory: an empty one.
        form: of the files.
        values: of the model.
        model: asked how tensors of files are computed, where they are not the model's own.
        report: told of the progress.

    Raises:
        ConfigError: a value is not finite in the type of its file.
    """
    done = 0
    state = model.state_dict()
    with ExitStack() as stack:
        files = _Files(directory, form, stack)
        for part in form.parts:
            for name, offset, run in _runs(part, values, model, state, form.types):
                done += files.write(name, offset, run)
                report(done, form.num_bytes)
    if len(form.files) > 1:
        metadata = {
            "total_parameters": sum(tensor.numel() for tensor in form.tensors.values()),
            "total_size": form.num_bytes,
        }
        index = {
            "metadata": metadata,
            "weight_map": {name: file_name for file_name, names in form.files.items() for name in names},
        }
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _runs(
    part: Part,
    values: Values,
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
    types: Mapping[str, torch.dtype],
) -> Iterator[tuple[str, int, torch.Tensor]]:
    def converted(name: str) -> Iterator[torch.Tensor]:
        if not state[name].is_floating_point():
            # Never published: it is the model's own.
            yield state[name].reshape(-1)
            return
        for run in values.runs(name):
            yield _converted(run, types[name], name)

    if part.is_equal:
        offset = 0
        for run in converted(part.names[0]):
            yield part.in_files[0], offset, run
            offset += run.numel() * run.element_size()
        return
    held = {name: torch.cat(list(converted(name))).view(state[name].shape) for name in part.names}
    for name, tensor in revert(model, held).items():
        yield name, 0, tensor.reshape(-1)


def _converted(run: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    if run.dtype == dtype:
        return run
    converted = run.to(dtype)
    if not converted.isfinite().all():
        raise ConfigError("dtype", f"{name} is not finite as {dtype}", action="write a wider type")
    return converted
