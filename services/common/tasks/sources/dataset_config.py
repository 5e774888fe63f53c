"""Configuration of a dataset: which rows and columns are prompts."""

from __future__ import annotations

from pydantic import Field, model_validator

from heterorl.common.process.config_file import Config

Value = str | int | float | bool
PROMPT, MESSAGES, ANSWER = "prompt", "messages", "answer"
"""Default column names."""


class DataConfig(Config):
    """Columns and rows of `hf:`, `parquet:` and `jsonl:`; the same on every node of a run."""

    prompt: str = Field(default=PROMPT, min_length=1)
    """Column of the prompt: text, or a list of messages with `role` and `content`, the user's last. Without a column of
    this default name, `messages` is taken."""
    messages: str = ""
    """Column of the prompt as messages; replaces `prompt`."""
    answer: str = ANSWER
    """Column of the right answer: text, a number, or JSON. A dot reads a field of a table, such as
    `reward_model.ground_truth`, here and in prompt and messages. Empty, or a default name that no row has: no answers,
    for rewards that need none."""
    subset: str = ""
    """hf: subset (configuration) of the dataset; empty: its default."""
    files: tuple[str, ...] = ()
    """hf: patterns of the files to read, such as `data/train-*.parquet`; empty: the subset's files, and the whole
    repository is downloaded."""
    evaluation_split: str = ""
    """hf: split of the held-out prompts; empty: some prompts of `task.name` are held out."""
    where: dict[str, Value | tuple[Value, ...]] = Field(default_factory=dict)
    """hf, parquet: rows to keep, by column: a value or a list of values."""
    at_least: dict[str, float] = Field(default_factory=dict)
    """hf, parquet: rows to keep, by column: smallest number."""
    at_most: dict[str, float] = Field(default_factory=dict)
    """hf, parquet: rows to keep, by column: largest number."""
    max_prompt_tokens: int = Field(default=0, ge=0)
    """Longest prompt with its template, tokens; longer ones are dropped and counted in the log. 0 is no bound."""
    cache_dir: str = ""
    """hf, parquet: directory of downloads and Arrow files; empty: the directory of HF_HOME."""

    @model_validator(mode="after")
    def _check_columns(self) -> DataConfig:
        if self.answer and self.answer in (self.prompt, self.messages):
            raise ValueError("answer is the column of the prompt; name another column")
        if self.files and self.evaluation_split:
            raise ValueError("files and evaluation_split are both set; remove one of them")
        return self
