"""Script that runs an agent function: `python -P call_function.py FILE NAME`.

A row comes as JSON on standard input.

Calls `NAME(row, base_url, api_key)`, which may be async, and writes the reward or its named parts to HETERORL_REWARD.
It does not import heterorl.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import random
import sys
from contextlib import suppress
from pathlib import Path


def main() -> None:
    """Call the function once."""
    path, name = Path(sys.argv[1]), sys.argv[2]
    # Before any code of the user: a process that the policy drives must not find it.
    reward = os.open(os.environ.pop("HETERORL_REWARD"), os.O_WRONLY | os.O_CLOEXEC)
    row = json.load(sys.stdin)
    seed = int(os.environ["HETERORL_SEED"])
    random.seed(seed)
    with suppress(ImportError):
        import numpy as np

        np.random.seed([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF])
    # Last: installed packages come first.
    sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    returned = getattr(module, name)(row, os.environ["HETERORL_BASE_URL"], os.environ["HETERORL_API_KEY"])
    if inspect.iscoroutine(returned):
        returned = asyncio.run(returned)
    # A process that the policy drives may have found the file in /proc.
    os.ftruncate(reward, 0)
    # numpy's numbers are none of JSON.
    os.write(reward, json.dumps(returned, default=float).encode("ascii"))


if __name__ == "__main__":
    main()
