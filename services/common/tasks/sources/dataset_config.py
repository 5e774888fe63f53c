"""Keys that say which rows and columns of a data set are prompts."""

from __future__ import annotations

from pydantic import Field, model_validator

from heterorl.common.process.config import Config

Value = str | int | float | bool
PROMPT, MESSAGES, ANSWER = "prompt", "messages", "answer"
"""Columns that are taken by themselves."""


class DataConfig(Config):
    """Columns and rows of `hf:`, `parquet:` and `jsonl:`; the same on every node of a run."""

    prompt: str = Field(default=PROMPT, min_length=1)
    """Column of the prompt: a text, or a list of messages, each with `role` and `content`, the user's last. Where there
    is none of this default name, a column `messages` is taken."""
    messages: str = ""
    """Column of the prompt as messages; it takes the place of `prompt`."""
    answer: str = ANSWER
    """Column of the right answer, which a reward is given: text, a number, or lists and tables, given as JSON.
    `reward_model.ground_truth` is a field of a column of tables; prompt and messages take such paths too. Empty, or a
    default name that no row has: there is none, for rewards that need none."""
    subset: str = ""
    """hf: configuration of the data set, as its page names it; empty is its default."""
    files: tuple[str, ...] = ()
    """hf: patterns of the files that are read, such as `data/train-*.parquet`; empty takes those that belong to the
    subset, and downloads the whole repository."""
    evaluation_split: str = ""
    """hf: split of the held-out prompts; empty holds out some of the prompts that `task.name` says."""
    where: dict[str, Value | tuple[Value, ...]] = Field(default_factory=dict)
    """hf and parquet: rows to keep, by column: a value, or a list of the values allowed."""
    at_least: dict[str, float] = Field(default_factory=dict)
    """hf and parquet: rows to keep, by column of numbers: the smallest value."""
    at_most: dict[str, float] = Field(default_factory=dict)
    """hf and parquet: rows to keep, by column of numbers: the largest value."""
    max_prompt_tokens: int = Field(default=0, ge=0)
    """Longest prompt with its template, tokens; longer ones are left out and counted. 0 is no bound."""
    cache_dir: str = ""
    """hf and parquet: directory of downloads and of rows in Arrow form; empty is that of HF_HOME."""

    @model_validator(mode="after")
    def _check_columns(self) -> DataConfig:
        if self.answer and self.answer in (self.prompt, self.messages):
            raise ValueError("answer is the column of the prompt: name another")
        if self.files and self.evaluation_split:
            raise ValueError("files are of one split: leave evaluation_split out, or files")
        return self
