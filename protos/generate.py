"""Generate the committed stubs from the protos: the only way they are made."""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent


def generate(out: Path) -> None:
    """Write *_pb2.py, *_pb2_grpc.py and their typed stubs for every proto under `out`/heterorl/v1."""
    binaries = Path(sys.executable).parent
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "heterorl").rglob("*.proto"))
    code = protoc.main(
        [
            "protoc",
            f"--proto_path={ROOT}",
            f"--plugin=protoc-gen-mypy={binaries / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={binaries / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out={out}",
            f"--mypy_grpc_out={out}",
            *protos,
        ]
    )
    if code != 0:
        raise SystemExit(code)
    (out / "heterorl" / "v1" / "__init__.py").write_text(
        '"""Generated from protos/heterorl; do not edit."""\n', encoding="utf-8"
    )
    (out / "heterorl" / "v1" / "py.typed").touch()


if __name__ == "__main__":
    # src/heterorl is services/.
    generate(ROOT.parent / "src")
