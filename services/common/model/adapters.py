"""LoRA adapters as torch modules.

y = W x + (alpha / rank) B (A x), W frozen and in the published type.

Guarantees: base tensors keep their names; an untrained adapter adds 0, because B starts at 0; A starts as a
function of the module's name only, so every node begins with the same adapters and version 0 need not be sent.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import blake3
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from heterorl.common.errors import ConfigError
from heterorl.common.model.model_loading import BUILDING
from heterorl.common.types.common import Digest, LoraSettings

PARTS = ("lora_a", "lora_b")
"""Last parts of the names of an adapter's tensors: A [rank, in], B [out, rank]."""
_KEY = "lora.target_modules"


class LoraLinear(nn.Linear):
    """A linear layer with its own frozen weight and an adapter."""

    def __init__(self, base: nn.Linear, *, rank: int, alpha: float, name: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight = base.weight
        self.register_parameter("bias", base.bias)
        self.scale = alpha / rank
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        start = _start_of_a(name, (rank, base.in_features))
        self.lora_a = nn.Parameter(start.to(**like))  # type: ignore[call-overload]
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, **like))  # type: ignore[call-overload]

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - nn.Linear's name
        inner = functional.linear(input, self.lora_a)
        return super().forward(input) + self.scale * functional.linear(inner, self.lora_b)

    def merged_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` + (alpha / rank) B A in fp32; `weight` may be elsewhere."""
        addition = self.scale * (self.lora_b.detach().float() @ self.lora_a.detach().float())
        return weight.float() + addition


def attach(model: nn.Module, settings: LoraSettings) -> None:
    """Freeze a model and add adapters to named linear layers, in place.

    What reads images or sounds has none: a text gives it no gradient. Raises ConfigError if a name fits no linear
    layer, or the output embedding, which is not read through its module.
    """
    model.requires_grad_(False)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    text = set(getattr(model, "get_decoder", lambda: model)().modules())
    names = set()
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            is_named = name in settings.target_modules
            if child is head:
                if is_named:
                    raise ConfigError(_KEY, f"{name} is the output embedding", action="name other linear layers")
            elif type(child) is nn.Linear and child in text:
                names.add(name)
                if is_named:
                    full = f"{path}.{name}" if path else name
                    with BUILDING:
                        adapted = LoraLinear(child, rank=settings.rank, alpha=settings.alpha, name=full)
                    setattr(parent, name, adapted)
    if missing := sorted(set(settings.target_modules) - names):
        action = f"name some of {', '.join(sorted(names))}" if names else "train all weights"
        raise ConfigError(_KEY, f"the model has no linear layer {', '.join(missing)}", action=action)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters by name, tied ones once: adapters if any, else all."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def has_adapters(model: nn.Module) -> bool:
    """Whether `attach` ran."""
    return any(isinstance(module, LoraLinear) for module in model.modules())


def start_of(name: str, shape: Sequence[int]) -> torch.Tensor | None:
    """The start of an adapter's tensor, in fp32; None for other tensors."""
    module, _, part = name.rpartition(".")
    if part not in PARTS:
        return None
    return _start_of_a(module, shape) if part == PARTS[0] else torch.zeros(*shape)


def base_digest(model: nn.Module) -> Digest:
    """Blake3 over names, shapes and bf16-rounded values of weights without adapters.

    Rounded, so that nodes that compute in bf16 and in fp32 agree on a base model stored in either.
    """
    state = model.state_dict()
    return digest_of(state, state.__getitem__)


def digest_of(state: Mapping[str, torch.Tensor], read: Callable[[str], torch.Tensor]) -> Digest:
    """`base_digest` of a model whose weights are read by `read`."""
    hasher = blake3.blake3(b"heterorl base 1")
    for name, tensor in sorted(state.items()):
        if tensor.is_floating_point() and name.rpartition(".")[2] not in PARTS:
            hasher.update(f"{name}\n{tuple(tensor.shape)}\n".encode())
            bits = read(name).detach().to(device="cpu", dtype=torch.bfloat16).contiguous().view(torch.int16)
            hasher.update(bits.numpy().astype("<i2", copy=False).tobytes())
    return Digest(hasher.hexdigest())


def _start_of_a(module: str, shape: Sequence[int]) -> torch.Tensor:
    seed = int.from_bytes(blake3.blake3(module.encode()).digest()[:8], "little")
    # numpy, not torch: PCG64 doubles are the same on every machine and in every release.
    bound = 1.0 / math.sqrt(shape[1])
    start = np.random.Generator(np.random.PCG64(seed)).random(tuple(shape)) * (2 * bound) - bound
    return torch.from_numpy(start.astype(np.float32))
