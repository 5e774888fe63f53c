"""The committed stubs are what the generator makes; the protos keep their style and their compatibility."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
PROTOS = ROOT / "protos"
BUF = Path(sys.executable).parent / "buf"


def test_stubs_equal_the_generators_output_byte_for_byte(tmp_path):
    code = "import generate, pathlib, sys; generate.generate(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=PROTOS, check=True, capture_output=True)

    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    kept = {
        path.relative_to(ROOT / "src"): path.read_bytes()
        for path in (ROOT / "src" / "heterorl" / "v1").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert made == kept


@pytest.mark.parametrize("arguments", [["lint"], ["breaking", "--against", "baseline.binpb"]])
def test_protos_pass_buf(arguments):
    result = subprocess.run([BUF, *arguments], cwd=PROTOS, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stdout


def test_buf_refuses_a_changed_field_type(tmp_path):
    copy = tmp_path / "protos"
    for path in [*PROTOS.glob("heterorl/v1/*.proto"), PROTOS / "buf.yaml", PROTOS / "baseline.binpb"]:
        target = copy / path.relative_to(PROTOS)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    changed = copy / "heterorl/v1/policy.proto"
    changed.write_text(changed.read_text().replace("uint64 offset = 2;", "string offset = 2;"))

    result = subprocess.run(
        [BUF, "breaking", "--against", "baseline.binpb"], cwd=copy, capture_output=True, check=False
    )

    assert result.returncode != 0


def test_every_rpc_names_status_codes_and_the_next_move():
    for path in PROTOS.glob("heterorl/v1/*.proto"):
        for comment, name in re.findall(r"((?:  //[^\n]*\n)+)  rpc (\w+)", path.read_text()):
            assert "UNAVAILABLE" in comment, f"{path.name}: {name} does not list UNAVAILABLE"
            assert re.search(r"[A-Z_]{6,}[^:]*: \w+", comment), f"{path.name}: {name} does not say the next move"
