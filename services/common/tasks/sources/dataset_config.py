"""Configuration of a dataset: which rows and columns are prompts."""

from __future__ import annotations

from pydantic import Field, model_validator

from heterorl.common.process.config_file import Config

Value = str | int | float | bool
PROMPT, MESSAGES, ANSWER = "prompt", "messages", "answer"
"""Default column names."""


class DataConfig(Config):
    """Columns and rows of `hf:`, `parquet:` and `jsonl:`; equal on every node."""

    prompt: str = Field(default=PROMPT, min_length=1)
    """Column of the prompt: text, or messages with `role` and `content`, the user's last. Without a column of the
    default name, `messages` is taken."""
    messages: str = ""
    """Column of the prompt as messages; replaces `prompt`."""
    answer: str = ANSWER
    """Column of the right answer: text, number or JSON. A dot reads a field (`reward_model.ground_truth`), in prompt
    and messages too. Empty, or no column of the default name: no answers."""
    subset: str = ""
    """hf: subset (configuration); empty: the default one."""
    files: tuple[str, ...] = ()
    """hf: patterns of files, such as `data/train-*.parquet`; empty: the subset's, after a download of the whole
    repository."""
    evaluation_split: str = ""
    """hf: split of held-out prompts; empty: some of task.name's prompts."""
    where: dict[str, Value | tuple[Value, ...]] = Field(default_factory=dict)
    """hf, parquet: rows to keep, by column: a value or a list of values."""
    at_least: dict[str, float] = Field(default_factory=dict)
    """hf, parquet: rows to keep, by column: smallest number."""
    at_most: dict[str, float] = Field(default_factory=dict)
    """hf, parquet: rows to keep, by column: largest number."""
    max_prompt_tokens: int = Field(default=0, ge=0)
    """Longest prompt with its template; longer ones are dropped and logged. 0: no bound."""
    cache_dir: str = ""
    """hf, parquet: directory of downloads and Arrow files; empty: HF_HOME's."""

    @model_validator(mode="after")
    def _check_columns(self) -> DataConfig:
        if self.answer and self.answer in (self.prompt, self.messages):
            raise ValueError("answer is the column of the prompt; name another column")
        if self.files and self.evaluation_split:
            raise ValueError("files and evaluation_split are both set; remove one of them")
        return self
