"""A file that is laid out first and filled afterwards is a safetensors file."""

import torch
from safetensors.torch import load_file

from heterorl.common.weights.safetensors_layout import SafetensorsLayout


def test_file_that_is_filled_in_any_order_is_a_safetensors_file(tmp_path):
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor(-0.0), "r": torch.arange(5, dtype=torch.uint8)}
    path = tmp_path / "x.safetensors"
    plan = SafetensorsLayout([("b", "F32", (2, 3)), ("a", "F32", ()), ("r", "U8", (5,))])

    with path.open("wb") as file:
        file.write(plan.header)
        file.truncate(plan.num_bytes)
        for name in ("r", "b", "a"):
            file.seek(plan.place(name))
            file.write(tensors[name].numpy().data)

    assert path.stat().st_size == plan.num_bytes
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
