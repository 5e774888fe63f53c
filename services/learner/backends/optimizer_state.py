"""AdamW and its state in checkpoint files.

    weights.safetensors     fp32 masters by parameter name, tied ones once
    optimizer.safetensors   `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME`; `random/cpu`, `random/cuda`
    state.json              {"format": 1, "applied_steps": n}; "lora": settings of adapters

Guarantees: read_state checks everything before it changes anything, and restores bit for bit.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from heterorl.common.errors import CorruptStore
from heterorl.common.model.adapters import trainable
from heterorl.common.types.common import NO_LORA, LoraSettings
from heterorl.learner.backends.tensor_file import TensorFile
from heterorl.learner.train.backend_config import BackendConfig

STEP = "step"
"""Key of a parameter's count of optimizer steps."""
MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
COUNTERS_FILE = "state.json"
FORMAT = 1


def build_optimizer(parameters: Iterable[nn.Parameter], config: BackendConfig) -> torch.optim.Optimizer:
    """The optimizer before its first step."""
    return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay, betas=config.betas)


def copy_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, applied_steps: int, lora: LoraSettings
) -> Callable[[Path], None]:
    """Copy a state in host memory, 12 bytes a parameter.

    Returns a function that writes the three files into an existing directory. With adapters the weights are the
    adapters only.
    """
    parameters = trainable(model)
    weights = {name: _copy(parameter) for name, parameter in parameters.items()}
    moments = {
        f"{key}/{name}": _copy(optimizer.state[parameter][key])
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for key in (*MOMENTS, STEP)
    }
    moments["random/cpu"] = torch.get_rng_state()
    device = next(model.parameters()).device
    if device.type == "cuda":
        moments["random/cuda"] = torch.cuda.get_rng_state(device)
    counters = json.dumps(counters_of(applied_steps, lora=lora))

    def write(directory: Path) -> None:
        save_file(weights, directory / WEIGHTS_FILE)
        save_file(moments, directory / OPTIMIZER_FILE)
        (directory / COUNTERS_FILE).write_text(counters, encoding="utf-8")

    return write


def counters_of(applied_steps: int, *, lora: LoraSettings) -> dict[str, object]:
    """The content of `state.json`."""
    counters: dict[str, object] = {"format": FORMAT, "applied_steps": applied_steps}
    if lora.rank:
        counters["lora"] = dataclasses.asdict(lora)
    return counters


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # Also where it is on the CPU: the next step writes into the tensor itself.
    return tensor.detach().to("cpu", copy=True).contiguous()


@torch.no_grad()
def read_state(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore a model and a fresh optimizer; returns the applied steps.
    One tensor at a time is in memory.

    Raises as `open_state`, before any change.
    """
    parameters = trainable(model)
    weights, moments, applied_steps = open_state(directory, parameters)
    random = moments.flat("random/cpu").clone()
    # Map all files before the first copy: a missing file then raises before any change.
    mapped = {name: weights.flat(name) for name in parameters}
    states = {name: moments.flat(name) for name in moments.tensors}
    for name, parameter in parameters.items():
        parameter.copy_(mapped.pop(name).view(parameter.shape))
        if f"step/{name}" in states:
            # The count is on the CPU for every device.
            optimizer.state[parameter] = {
                key: states.pop(stored).view(moments.tensors[stored].shape).to(place, copy=True)
                for key in (*MOMENTS, STEP)
                for stored, place in [(f"{key}/{name}", "cpu" if key == STEP else parameter.device)]
            }
    torch.set_rng_state(random)
    device = next(model.parameters()).device
    if device.type == "cuda" and "random/cuda" in states:
        torch.cuda.set_rng_state(states["random/cuda"].clone(), device)
    return applied_steps


def open_state(directory: Path, parameters: Mapping[str, torch.Tensor]) -> tuple[TensorFile, TensorFile, int]:
    """Weights, moments and applied steps of a state, checked against a model.

    Raises CorruptStore: a file is missing, broken, or of another model.
    """
    weights, moments = TensorFile(directory / WEIGHTS_FILE), TensorFile(directory / OPTIMIZER_FILE)
    try:
        counters = json.loads((directory / COUNTERS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptStore(f"checkpoint {directory} cannot be read: {error}") from error
    applied_steps = _check_state(directory, parameters, weights.tensors, moments.tensors, counters)
    try:
        # Torch checks it when it is set: set it in a throw-away generator.
        torch.Generator().set_state(moments.flat("random/cpu").clone())
    except RuntimeError as error:
        raise CorruptStore(f"checkpoint {directory}: random/cpu is not a random state: {error}") from error
    return weights, moments, applied_steps


def read_lora(directory: Path) -> LoraSettings:
    """The adapter settings of a state; NO_LORA where it holds all weights.

    Raises CorruptStore: the file is missing or broken.
    """
    try:
        stated = json.loads((directory / COUNTERS_FILE).read_text(encoding="utf-8")).get("lora")
        if stated is None:
            return NO_LORA
        return LoraSettings(
            rank=int(stated["rank"]),
            alpha=float(stated["alpha"]),
            target_modules=tuple(str(name) for name in stated["target_modules"]),
            base_digest=str(stated["base_digest"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptStore(f"checkpoint {directory} cannot be read: {error!r}") from error


def _check_state(
    directory: Path,
    parameters: Mapping[str, torch.Tensor],
    weights: dict[str, torch.Tensor],
    moments: dict[str, torch.Tensor],
    counters: object,
) -> int:
    """Check a state against the model; returns its applied steps."""
    if not isinstance(counters, dict) or counters.get("format") != FORMAT:
        raise CorruptStore(f"checkpoint {directory}: {COUNTERS_FILE} is not of format {FORMAT}")
    applied_steps = counters.get("applied_steps")
    if not isinstance(applied_steps, int) or applied_steps < 0:
        raise CorruptStore(f"checkpoint {directory}: applied_steps is not a count")
    shapes = {name: (parameter.shape, parameter.dtype) for name, parameter in parameters.items()}
    if {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()} != shapes:
        raise CorruptStore(f"checkpoint {directory}: weights of another model", action="check model_dir")
    for name, parameter in parameters.items():
        expected = [f"{key}/{name}" for key in MOMENTS]
        found = [stored in moments for stored in (*expected, f"{STEP}/{name}")]
        if any(found) and not all(found):
            raise CorruptStore(f"checkpoint {directory}: part of the optimizer state of {name} is missing")
        if all(found) and any(moments[stored].shape != parameter.shape for stored in expected):
            raise CorruptStore(f"checkpoint {directory}: optimizer state of another model", action="check model_dir")
        if all(found) and any(moments[stored].dtype != torch.float32 for stored in (*expected, f"{STEP}/{name}")):
            raise CorruptStore(f"checkpoint {directory}: optimizer state of {name} in another type")
        if all(found) and moments[f"step/{name}"].shape != ():
            raise CorruptStore(f"checkpoint {directory}: the step count of {name} is not a number")
    if "random/cpu" not in moments:
        raise CorruptStore(f"checkpoint {directory}: the random state is missing")
    for name in ("random/cpu", "random/cuda"):
        # Torch takes bytes only; `open_state` checks their number.
        state = moments.get(name)
        if state is not None and state.dtype != torch.uint8:
            raise CorruptStore(f"checkpoint {directory}: {name} is not a random state")
    return applied_steps
