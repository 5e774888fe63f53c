"""Committed results of the lab -> the pictures of documents, in research/docs/assets.

python -m research.docs.pictures writes those that are not up to date; --all writes every one, and names write those. A
picture carries the digest of what it shows in its own file; a test computes the digests anew. Pixels are never
compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from heterorl_research.lab.report import curves, differences, forest, ladders, plane, sweeps
from heterorl_research.lab.report.data import Results
from heterorl_research.lab.report.drawing.canvas import Picture, beside, save
from heterorl_research.lab.report.drawing.drawn import digest
from heterorl_research.lab.report.drawing.palette import looks
from heterorl_research.lab.report.reading import load_table
from heterorl_research.lab.report.sweeps import Paired
from research.docs.lab_tables import RESULTS

ASSETS = Path(__file__).parent / "assets"
KEYWORD = "Heterorl-Drawn"
"""Of the text in a PNG file that holds its digest."""
TOKENS = {"t5": 5, "t21": 21, "t101": 101, "t101-slow": 101}
_RATES = {
    "t101": "101 tokens, 64 versions behind, learning rate 1e-4",
    "t101-slow": "101 tokens, 64 versions behind, learning rate 3e-5",
}
_REGIME = {"G": "8", "kl": "0.005", "temperature": "1.0", "top_k": "all", "top_p": "1.0"}


_VARIANTS = {"noise": "3e-5, engines .0011 nats a token apart", "exact-1e-4": "1e-4"}


def _lab(name: str, *, without: Collection[str] = (), tasks: Collection[str] = ()) -> Results:
    found = load_table(RESULTS / f"{name}.json")
    runs = [run for run in found.runs if run.algorithm not in without and (not tasks or run.task in tasks)]
    return found.model_copy(update={"runs": runs})


def _horizon() -> Picture:
    # GSPO with the paper's tight clip hardly learns, and with OPSM instead it is GSPO without delay.
    results = _lab("horizon", without=("gspo-tight", "gspo-opsm"))
    found = {picture.name: picture for picture in differences.pictures(results, looks(results.arms))}
    return replace(found["difference_gepo"], panels=["no delay", "64 versions behind"])


def _ladder() -> Picture:
    results = _lab("ladder")
    (picture,) = ladders.ladders(results, looks(results.arms))
    return picture


def _lengths() -> Picture:
    results = _lab("lengths")
    return ladders.by_tokens(results, looks(results.arms), TOKENS)


def _plane() -> Picture:
    (picture,) = plane.pictures(_lab("plane"))
    return picture


def _one_side() -> Picture:
    seen, fresh = (
        replace(sweeps.paired(_lab(name), Paired(baseline="gepo-1s", floor=-0.3)), panels=[title])
        for name, title in (("candidates", "candidates: 16 seeds"), ("confirm", "confirm: 16 other seeds"))
    )
    return beside("one-side", seen, fresh)


def _sweeps() -> Picture:
    return sweeps.paired(_lab("s7_sweeps"), Paired(regime=_REGIME))


def _long() -> Picture:
    # GEPO without its upper clip lies on GEPO's line.
    results = _lab("lengths", tasks=_RATES, without=("gepo-1s",))
    return curves.across_tasks(results, looks(results.arms), _RATES)


def _cliff() -> Picture:
    # gepo-1s has GEPO's rewards in every step here.
    found = _lab("cliff301", without=("gepo-1s",))
    runs = [run.model_copy(update={"task": run.variant, "variant": ""}) for run in found.runs]
    results = found.model_copy(update={"runs": runs})
    return curves.across_tasks(results, looks(results.arms), _VARIANTS)


def _product() -> Picture:
    results = _lab("long")
    picture, _ = curves.accuracy(results, looks(results.arms))
    return replace(picture, panels=["101 tokens, no delay, learning rate 1e-4", _RATES["t101"]])


def _whole() -> Picture:
    rates, ends, lengths = (_lab(name).finished for name in ("whole", "whole_ends", "whole_lengths"))
    settings = {
        "no delay, 5 tokens": [run for run in ends if run.delay == 0.0],
        **{
            f"64 versions, 5 tokens, rate {rate:g}": [run for run in rates if run.lr == rate]
            for rate in sorted({run.lr for run in rates if run.lr is not None})
        },
        "256 versions, 5 tokens": [run for run in ends if run.delay == 256.0],
        **{
            f"64 versions, {TOKENS[task]} tokens": [run for run in lengths if run.task == task]
            for task in ("t21", "t101")
        },
    }
    return forest.forest(settings, "gepo-whole")


PICTURES: dict[str, Callable[[], Picture]] = {
    "cliff": _cliff,
    "horizon": _horizon,
    "ladder": _ladder,
    "lengths": _lengths,
    "long": _long,
    "one-side": _one_side,
    "plane": _plane,
    "product": _product,
    "sweeps": _sweeps,
    "whole": _whole,
}
"""Name of the file to what is drawn, from committed results alone."""


def made(name: str) -> Picture:
    """The picture of a file, not yet drawn."""
    return replace(PICTURES[name](), name=name)


def _note(path: Path, text: str) -> None:
    """Write a PNG file again with a text, and with 256 colours, which are enough and a third of the bytes."""
    image = Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    info = PngInfo()
    info.add_text(KEYWORD, text)
    image.save(path, pnginfo=info, optimize=True)


def noted(path: Path) -> str:
    """The digest that a PNG file says it shows; empty where it says none."""
    with Image.open(path) as image:
        return str(image.info.get(KEYWORD, ""))


def write(names: Collection[str] = (), *, directory: Path = ASSETS, is_forced: bool = False) -> list[str]:
    """Draw what is not up to date, or is named, or all; returns the names of what was drawn."""
    drawn = []
    for name in names or PICTURES:
        picture, path = made(name), directory / f"{name}.png"
        found = digest(picture)
        if names or is_forced or not path.is_file() or noted(path) != found:
            save(picture, directory)
            _note(path, found)
            drawn.append(name)
    return drawn


if __name__ == "__main__":
    arguments = [word for word in sys.argv[1:] if word != "--all"]
    sys.stdout.write("".join(f"drawn: {name}.png\n" for name in write(arguments, is_forced="--all" in sys.argv)))
