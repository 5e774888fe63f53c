"""The command `heterorl lab`, whose code is a distribution of its own: heterorl-research."""

from __future__ import annotations

import importlib
import importlib.util
from typing import NoReturn

import typer

from heterorl.common.errors import OperatorError

PACKAGE = "heterorl_research"


def add_lab(app: typer.Typer, *, panel: str) -> None:
    """Add `lab` where its package is installed; elsewhere a hidden `lab` says what to install."""
    if importlib.util.find_spec(PACKAGE) is None:
        anything = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command("lab", hidden=True, add_help_option=False, context_settings=anything)(refuse)
        return
    app.add_typer(importlib.import_module(f"{PACKAGE}.command").app, name="lab", rich_help_panel=panel)


def refuse() -> NoReturn:
    """Say what to install.

    Raises:
        OperatorError: always.
    """
    raise OperatorError("heterorl-research is not installed", action="in a clone of heterorl: pip install ./research")
