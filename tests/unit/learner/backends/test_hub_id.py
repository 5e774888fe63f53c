"""A hub id opens like a directory: by the files of the hub's cache, of which no more is read than is used."""

import os
import subprocess
import sys

import pytest

from tests.support.training import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
REVISION = "0123456789abcdef0123456789abcdef01234567"

# Arguments: the id, and the directory that has the same model.
OPEN = """
import sys
import torch
from heterorl.learner.backends.loading import fill, open_model
from heterorl.learner.backends.tensor_file import weight_files
from heterorl.learner.backends.ranks.rank_group import model_digest
name, directory = sys.argv[1:]
opened = open_model(name, may_hold=False)
assert all(parameter.is_meta for parameter in opened.model.parameters())
files = weight_files(name)
assert all("/snapshots/" in str(path) for path in files), files
expected, own = (dict(fill(open_model(which)).named_parameters()) for which in (directory, name))
assert own.keys() == expected.keys()
assert all(torch.equal(own[key], expected[key]) for key in expected)
print(opened.is_held, len(files), model_digest(name)[:6])
"""


@pytest.mark.parametrize("max_shard_size", ["1GB", 8000], ids=["one file", "sharded index"])
def test_hub_id_is_read_by_name_from_the_cache(tmp_path, max_shard_size):
    directory = tmp_path / "model"
    tiny_model().save_pretrained(directory, max_shard_size=max_shard_size)
    repository = tmp_path / "home" / "hub" / "models--acme--tiny"
    snapshot, blobs = repository / "snapshots" / REVISION, repository / "blobs"
    for folder in (snapshot, blobs, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    for path in directory.iterdir():
        (blobs / f"blob-{path.name}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(os.path.relpath(blobs / f"blob-{path.name}", snapshot))
    number = len(list(directory.glob("*.safetensors")))
    assert (number > 1) is (max_shard_size == 8000)

    done = subprocess.run(
        [sys.executable, "-c", OPEN, "acme/tiny", str(directory)],
        env={name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
        | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", str(number), "blake3"]
