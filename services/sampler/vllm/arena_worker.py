"""Worker extension inside vLLM: loads a weights file into the model.

After `load_arena_file`, every parameter and all that vLLM derived from it (fused, packed) comes from the file. A file
that leaves a parameter out is an error. Reads safetensors only. Must never import vllm, whose worker mixes it in.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import psutil
import torch

WATCH_S = 2.0


class ArenaWorker:
    """Mixed into vLLM's worker (`worker_extension_cls`), whose attributes it uses; called by `collective_rpc`."""

    def load_arena_file(self, path: str, aliases: Mapping[str, str]) -> int:
        """Load a safetensors file with Hugging Face names; returns its tensors' number.

        Every worker reads its own shard of each tensor. `aliases` maps tied tensors that the file lacks to their names
        in it. Raises RuntimeError if the file has a tensor that the model lacks, or the reverse.
        """
        worker: Any = self
        model: Any = worker.model_runner.get_model()
        names: set[str] = set()
        loaded: set[str] = set()
        expected = {name for name, _ in model.named_parameters()}
        load_weights = model.load_weights

        def note(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            loaded.update(load_weights(weights) or ())
            return loaded

        # reload_weights only warns of parameters that no tensor reached.
        model.load_weights = note
        is_on_cpu = next(model.parameters()).device.type == "cpu"
        if is_on_cpu:
            _forget_packed_experts(model)
        try:
            worker.reload_weights(weights_iterator=_tensors_of(path, aliases, names))
        finally:
            del model.load_weights
        if expected - loaded:
            raise RuntimeError(f"no weights for {sorted(expected - loaded)[:3]}")
        if is_on_cpu:
            _pack_again(model)
        return len(names)

    def end_with(self, pid: int) -> None:
        """End vLLM's processes when `pid`, which started them, is gone."""
        # The engine's own process is a child of `pid`: this one, or the parent of this one.
        engine = psutil.Process(os.getpid() if os.getppid() == pid else os.getppid())
        threading.Thread(target=_watch, args=(engine, pid), name="end-with", daemon=True).start()


def _watch(engine: psutil.Process, pid: int) -> None:
    pause = threading.Event()
    try:
        while engine.ppid() == pid:
            pause.wait(WATCH_S)
        engine.kill()
    except psutil.NoSuchProcess:
        pass
    os._exit(1)


def _tensors_of(path: str, aliases: Mapping[str, str], names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt", device="cpu") as file:
        for name in file.keys():  # noqa: SIM118 - a file is no dictionary
            names.add(name)
            yield name, file.get_tensor(name)
        # A reload takes tied layers apart: each needs the tensor under its own name.
        for alias, name in aliases.items():
            yield alias, file.get_tensor(name)


def _forget_packed_experts(model: Any) -> None:
    """Make a reload pack experts' weights, as a first load does.

    On the CPU experts multiply with packed weights. vLLM's first load packs them when it makes the layer's kernel
    (`_setup_kernel`); a later load finds the kernel and writes unpacked weights over packed ones.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_again(model: Any) -> None:
    """Renew vLLM's packed copies where its own reload does not.

    On the CPU a layer multiplies with a packed copy of its weight (`cpu_linear`). The reload renews the copy of each
    layer that got a tensor. An output layer tied to the embedding gets none in architectures that skip its name.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        # Layers whose weight was given up for its packed copy (now empty) were loaded, so they were packed again.
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
            module.quant_method.process_weights_after_loading(module)
