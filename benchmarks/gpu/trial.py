"""The GPU trial: every part in a process and with a time limit of its own, and one file that says what the card did.

A part that fails or is late ends alone; its rows until then stay. A second call repeats only what is not done. What a
part needs and the machine lacks is skipped by name. On a machine without a card all parts run at a tenth of their
size, to see that they run.

    make gpu-trial MINUTES=25
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import PEAK, Place, Rows

RESULTS = Path("benchmarks/results/gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A module of this folder, and its share of the time."""

    name: str
    share: float
    title: str


PARTS = (
    Part(name="card", share=0.05, title="the card by itself"),
    Part(name="suite", share=0.15, title="tests"),
    Part(name="steps", share=0.25, title="a learner's step"),
    Part(name="ranks", share=0.1, title="FSDP2 and ZeRO with one rank"),
    Part(name="engines", share=0.1, title="engines"),
    Part(name="codec", share=0.1, title="a version of 8 B weights"),
    Part(name="whole", share=0.15, title="a whole run on one card"),
    Part(name="long_outputs", share=0.1, title="losses at 301 tokens"),
)


def main() -> None:
    """Run the parts that are not done, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda where torch sees a card")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS])
    parser.add_argument("--again", action="store_true", help="repeat what is done")
    parser.add_argument("--part", choices=[part.name for part in PARTS], help=argparse.SUPPRESS)
    parser.add_argument("--limit-s", type=float, default=600.0, help=argparse.SUPPRESS)
    parser.add_argument("--peak-tflops", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = arguments.device or _device()
    if arguments.part:
        place = Place(
            device=device, is_small=device == "cpu", limit_s=arguments.limit_s, peak_tflops=arguments.peak_tflops
        )
        importlib.import_module(f"benchmarks.gpu.{arguments.part}").run(Rows(arguments.out), place)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{_card(device).replace(' ', '-')}.json"
    document = _begun(path, device)
    asked = [part for part in PARTS if part.name in (arguments.parts or [part.name])]
    done = {} if arguments.again else {row["name"]: row for row in document["parts"] if row["status"] == "done"}
    left = [part for part in asked if part.name not in done]
    ends = time.monotonic() + 60 * arguments.minutes
    for part in left:
        later = sum(other.share for other in left[left.index(part) :])
        limit_s = max(0.0, ends - time.monotonic()) * part.share / later
        row = _run(part, device, limit_s, peak_tflops=_peak(document))
        document["parts"] = [other for other in document["parts"] if other["name"] != part.name] + [row]
        document["parts"].sort(key=lambda row: [part.name for part in PARTS].index(row["name"]))
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        print(f"== {part.title}: {row['status']} after {row['seconds']:.0f} of {limit_s:.0f} s", flush=True)
    print(path)


def _peak(document: dict[str, Any]) -> float:
    found = [row["value"] for part in document["parts"] for row in part["rows"] if row["what"] == PEAK]
    return float(found[0]) if found else 0.0


def _run(part: Part, device: str, limit_s: float, *, peak_tflops: float) -> dict[str, Any]:
    """A part in a process group of its own, which ends with it."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.gpu.trial", "--part", part.name, "--device", device,
                   "--out", str(file), "--limit-s", str(limit_s), "--peak-tflops", str(peak_tflops)]  # fmt: skip
        started = time.monotonic()
        with (Path(name) / "log").open("w+") as log:
            child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = child.wait(limit_s)
                status = "done" if code == 0 else "failed"
            except subprocess.TimeoutExpired:
                status = "out of time"
            finally:
                _end(child)
            log.seek(0)
            lines = log.read().splitlines()
        print("\n".join(lines[-40:]), flush=True)
        row = {
            "name": part.name, "title": part.title, "status": status, "limit_s": round(limit_s),
            "seconds": round(time.monotonic() - started, 1),
            "rows": json.loads(file.read_text(encoding="utf-8")) if file.exists() else [],
        }  # fmt: skip
        return row | ({} if status == "done" else {"last_words": lines[-3:]})


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _begun(path: Path, device: str) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"parts": []}
    return {
        "card": _card(device),
        "memory_gib": _memory_gib(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "is_small": device == "cpu",
        "parts": found["parts"],
    }


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _card(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "no card"


def _memory_gib(device: str) -> float:
    import torch

    return round(torch.cuda.get_device_properties(0).total_memory / (1 << 30), 1) if device == "cuda" else 0.0


if __name__ == "__main__":
    main()
