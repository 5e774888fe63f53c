"""The worker extension beside a worker made of plain tensors that reloads as vLLM does: layer by layer, tied ones apart."""

import os
import subprocess
import sys

import psutil
import pytest
import safetensors.torch
import torch
from torch import nn

from heterorl.sampler.vllm.arena_worker import ArenaWorker


class Packing:
    """Quantisation method that multiplies with a copy of the weight."""

    def process_weights_after_loading(self, layer):
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda x: x @ packed.T


class Layer(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.quant_method = Packing()
        self.quant_method.process_weights_after_loading(self)


class Model(nn.Module):
    """An embedding, a norm, and an output layer tied to the embedding, whose name it skips as some architectures do."""

    def __init__(self):
        super().__init__()
        self.embed = Layer(nn.Parameter(torch.zeros(3, 2)))
        self.norm = nn.LayerNorm(2)
        self.head = Layer(self.embed.weight)

    @torch.no_grad()
    def load_weights(self, weights):
        loaded = set()
        for name, tensor in weights:
            if name != "head.weight":
                self.get_parameter(name).copy_(tensor)
                loaded.add(name)
        # Only what was loaded is packed again.
        if "embed.weight" in loaded:
            self.embed.quant_method.process_weights_after_loading(self.embed)
        return loaded


class Worker(ArenaWorker):
    def __init__(self):
        self.model_runner = self
        self.model = Model()
        self.offered = []

    def get_model(self):
        return self.model

    def reload_weights(self, weights_iterator):
        offered = list(weights_iterator)
        self.offered = [name for name, _ in offered]
        self.model.load_weights(iter(offered))


TENSORS = {"embed.weight": torch.arange(6.0).view(3, 2), "norm.weight": torch.ones(2), "norm.bias": torch.zeros(2)}


def test_tied_layer_computes_with_the_new_weight(tmp_path):
    safetensors.torch.save_file(TENSORS, tmp_path / "model.safetensors")
    worker = Worker()

    count = worker.load_arena_file(str(tmp_path / "model.safetensors"), {"head.weight": "embed.weight"})

    assert count == 3
    assert sorted(worker.offered) == ["embed.weight", "head.weight", "norm.bias", "norm.weight"]
    x = torch.tensor([[1.0, 2.0]])
    torch.testing.assert_close(worker.model.head.cpu_linear(x), x @ TENSORS["embed.weight"].T)
    assert worker.model.load_weights.__func__ is Model.load_weights


def test_parameter_that_no_tensor_reaches_is_an_error(tmp_path):
    tensors = {name: tensor for name, tensor in TENSORS.items() if name != "norm.bias"}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(RuntimeError, match=r"norm\.bias"):
        Worker().load_arena_file(str(tmp_path / "model.safetensors"), {})


PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", CHILD.replace("PID", str(os.getpid()))])
print(child.pid, flush=True)
child.wait()
"""
CHILD = """
import threading
from heterorl.sampler.vllm import arena_worker
arena_worker.WATCH_S = 0.05
arena_worker.ArenaWorker().end_with(PID)
print("watching", flush=True)
threading.Event().wait()
"""


@pytest.mark.process
def test_worker_ends_when_the_process_that_started_it_was_killed():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", f"CHILD = {CHILD!r}\n{PARENT}"], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert parent.stdout.readline().strip() == "watching"
        assert child.is_running()

        parent.kill()

    _, alive = psutil.wait_procs([child])
    assert alive == []
