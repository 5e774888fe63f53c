"""`heterorl export`: a trained model as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

ExportDtype = Literal["bf16", "fp16", "fp32"]


def export(
    checkpoint: Annotated[Path, typer.Option(help="A learner's checkpoint directory or its state directory.")],
    model_dir: Annotated[Path, typer.Option(help="The model that the run started from (config, tokenizer).")],
    out: Annotated[Path, typer.Option(help="Directory to write; a new one.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapters alone, as peft reads them.")] = False,
    dtype: Annotated[ExportDtype | None, typer.Option(help="Type of the weights; as published if not given.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of a file of weights, such as 5GB.")] = "50GB",
) -> None:
    """Write a trained model as a Hugging Face directory (safetensors, config, tokenizer); adapters are merged.

    The model is not loaded: one tensor at a time is in memory. The directory appears when all of it is on the disk.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from heterorl.learner.export import export_model

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True, markup=False, highlight=False), transient=True) as bar:
        task = bar.add_task("writing weights", total=None)
        export_model(
            model_dir=model_dir,
            source=checkpoint,
            out_dir=out,
            adapter_only=adapter,
            dtype=dtype,
            max_shard_size=max_shard_size,
            report=lambda done, total: bar.update(task, completed=done, total=total),
        )
    Console(markup=False, emoji=False, highlight=False).print(f"model written to {out}")
