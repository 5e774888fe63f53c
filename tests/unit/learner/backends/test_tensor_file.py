"""A safetensors file is read a tensor at a time, and never written to."""

import pytest
import torch
from safetensors.torch import save_file

from heterorl.common.errors import CorruptStore
from heterorl.learner.backends.tensor_file import TensorFile


def test_pieces_are_read_from_a_file_of_the_torch_backend(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.arange(12.0).reshape(3, 4), "n": torch.tensor(7.0), "e": torch.zeros(0, 3)}, path)

    file = TensorFile(path)

    assert file.flat("w")[5:8].tolist() == [5.0, 6.0, 7.0]
    assert file.flat("n").tolist() == [7.0]
    assert file.flat("e").numel() == 0
    assert file.tensors["w"].shape == (3, 4)


def test_reading_a_piece_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.arange(12.0)}, path)
    before = path.read_bytes()

    TensorFile(path).flat("w").zero_()

    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", [lambda data: data[:-5], lambda data: b"\xff" * 8 + data[8:], lambda data: b""])
def test_broken_file_is_refused(tmp_path, damage):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.arange(12.0)}, path)
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(CorruptStore):
        TensorFile(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_tensors_come_in_the_type_that_they_have(tmp_path, dtype):
    values = torch.arange(9).to(dtype)
    save_file({"a": torch.zeros(1), "w": values}, tmp_path / "x.safetensors")

    file = TensorFile(tmp_path / "x.safetensors")

    assert file.tensors["w"].dtype == dtype
    assert torch.equal(file.flat("w"), values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_tensor_of_another_type_is_not_taken_for_a_known_one(tmp_path, dtype):
    save_file({"w": torch.zeros(4, dtype=dtype)}, tmp_path / "x.safetensors")

    assert TensorFile(tmp_path / "x.safetensors").tensors["w"].dtype == torch.float64


def test_file_that_is_gone_or_cut_off_later_is_a_broken_one(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.arange(12.0)}, path)
    file = TensorFile(path)

    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CorruptStore, match="cannot be read"):
        file.flat("w")
    path.unlink()
    with pytest.raises(CorruptStore, match="cannot be read"):
        file.flat("w")
