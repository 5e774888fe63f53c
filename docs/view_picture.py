"""Makes docs/assets/view.png: `heterorl view` of made-up samples, in Chromium, by a path that is no machine's.

python -m docs.view_picture docs/assets/view.png
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from heterorl.common.types.sample import rollout_json
from tests.support.browser import browser
from tests.support.samples import make_sample

ROOT = Path(__file__).parents[1]
COUNT, SHOWN = 399, 395
"""Samples of the export, and the one that is shown: texts of several lengths, right and wrong."""
WIDTH, HEIGHT = 1280, 674
"""Of the picture, which ends with the first row of completions."""


def main(path: Path) -> None:
    """Write the picture: one sample, with the numbers of one token."""
    with tempfile.TemporaryDirectory() as directory:
        with Path(directory, "run.jsonl").open("w") as file:
            for sample in (make_sample(number, rollouts=8, steps=6) for number in range(1, COUNT + 1)):
                rows = (rollout_json(sample, i, with_tokens=True) for i in range(len(sample.rollouts)))
                file.writelines(json.dumps(row) + "\n" for row in rows)
        # From there, so that the page shows the file's name alone.
        command = [sys.executable, "-m", "heterorl", "view", "run.jsonl", "--no-browser"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TZ": "UTC"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=directory)
        assert process.stdout is not None
        try:
            found = re.search(r"http://127\.0\.0\.1:\d+/\?key=\S+", process.stdout.readline())
            assert found is not None
            _take(found.group(), path)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
            process.stdout.close()


def _take(url: str, path: Path) -> None:
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light", timezone_id="UTC")
        page.goto(url)
        page.locator("#state", has_text=f"{COUNT} samples").wait_for(state="attached")
        page.goto(f"{url.split('/?')[0]}/sample/{SHOWN}")
        page.locator("#completion-2 pre span").nth(1).hover()
        page.screenshot(path=str(path))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
