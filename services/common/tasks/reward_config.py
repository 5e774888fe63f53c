"""Configuration of rewards: tables `[[task.rewards]]`, told apart by `kind`."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, JsonValue, ValidationInfo, field_validator, model_validator

from heterorl.common.identity.signing import PublicKey
from heterorl.common.process.address import Url
from heterorl.common.process.config_file import DIRECTORY, Config

MAX_REWARDS = 16
"""Rewards of one task."""


def from_file(value: str, info: ValidationInfo) -> str:
    """Absolute form of a path relative to the configuration file."""
    return str(Path((info.context or {}).get(DIRECTORY, "")).absolute() / value)


Directory = Annotated[str, AfterValidator(from_file)]
"""A path relative to the configuration file, made absolute; empty is the file's directory."""


File = Annotated[str, AfterValidator(lambda value, info: from_file(value, info) if value else value)]
"""A path relative to the configuration file, made absolute; empty is none."""


class RewardBase(Config):
    """Keys of every reward."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name in curves, samples and journals."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of the value in the reward; 0 only measures, a negative weight punishes."""
    needs_answers: ClassVar[bool] = False


class MatchRewardConfig(RewardBase):
    """The task's own score, such as task.match."""

    kind: Literal["match"] = "match"
    """The task's own score."""
    needs_answers: ClassVar[bool] = True


class FunctionRewardConfig(RewardBase):
    """A Python function; see task.reward."""

    kind: Literal["function"] = "function"
    """A Python function."""
    function: str
    """As task.reward, without urls; named parts are shown as NAME/PART."""
    directory: Annotated[str, AfterValidator(from_file)] = ""
    """Directory of its module, relative to the configuration file; empty: its directory."""


class RemoteRewardBase(RewardBase):
    """Keys of every reward that a remote service computes."""

    url: Url = Field(pattern=r"^https?://[^\s]+$", max_length=2048)
    """Address of the service; each site may have its own."""
    low: float = Field(default=0.0, allow_inf_nan=False)
    """Smallest value; a smaller one is an error."""
    high: float = Field(default=1.0, allow_inf_nan=False)
    """Largest value; a larger one is an error."""
    api_key_env: str = Field(default="", pattern=r"^[A-Za-z_0-9]*$", max_length=128)
    """Environment variable of the bearer token; empty: none, or api_key_file."""
    api_key_file: File = ""
    """File of the bearer token, relative to the configuration file."""
    ca_file: File = ""
    """CA file (PEM) of the server; empty: the system's."""

    @model_validator(mode="after")
    def _has_a_range(self) -> RemoteRewardBase:
        if not self.low < self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        return self


class HttpRewardConfig(RemoteRewardBase):
    """A reward service, asked by HTTP POST; docs/rewards.md has the JSON documents."""

    kind: Literal["http"] = "http"
    """A reward service, asked by HTTP POST."""
    batch: Literal["completion", "group"] = "completion"
    """One request for each `completion` when it ends, or for each `group`."""
    version: str = Field(default="", max_length=128)
    """Version of the service; change it with the service. Part of the contract."""
    signed_by: tuple[PublicKey, ...] = ()
    """Public keys, one of which signs each value, so that the learner trusts no site. Only with batch `completion`. Not
    part of the contract."""

    @model_validator(mode="after")
    def _signs_completions(self) -> HttpRewardConfig:
        if self.signed_by and self.batch == "group":
            raise ValueError('signed_by needs batch = "completion": a signature is of one completion, not of a group')
        return self


class JudgeRewardConfig(RemoteRewardBase):
    """A language model that scores each completion, over OpenAI's chat completions."""

    kind: Literal["judge"] = "judge"
    """A language model as judge."""
    model: str = Field(min_length=1, max_length=256)
    """Name of the model."""
    rubric: str = Field(default="", max_length=1 << 16)
    """Prompt of the judge, with `{prompt}`, `{completion}` and `{answer}`; empty: rubric_file."""
    rubric_file: File = ""
    """File of the rubric, relative to the configuration file."""
    field: str = Field(default="score", min_length=1, max_length=128)
    """Field of the score in the answer's last JSON object. The scale low to high becomes a reward of 0 to 1."""
    pattern: str = Field(default="", max_length=1024)
    """Regular expression of the score (first group of the last match); replaces field."""
    request: dict[str, JsonValue] = Field(default={"temperature": 0.0, "max_tokens": 512}, max_length=32)
    """Fields of each request besides `model` and `messages`. Reasoning models of OpenAI take `{ max_completion_tokens =
    4096 }`."""
    cache_file: str = "runs/judge.sqlite"
    """SQLite cache of scores, shared with requests_per_minute by a machine's processes. Delete it at any time."""
    cache_entries: int = Field(default=1_000_000, ge=1)
    """Cached scores; the oldest are removed."""
    requests_per_minute: float = Field(default=0.0, ge=0)
    """Requests to this url from all processes with this cache_file; 0: no bound."""

    @property
    def needs_answers(self) -> bool:  # type: ignore[override]
        """Whether the rubric names `{answer}`."""
        text = self.rubric
        if self.rubric_file:
            # The constructor of the judge refuses a file that cannot be read.
            with suppress(OSError, UnicodeDecodeError):
                text = Path(self.rubric_file).read_text(encoding="utf-8")
        return "{answer}" in text

    @field_validator("request")
    @classmethod
    def _leaves_model_and_messages(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if taken := value.keys() & {"model", "messages", "stream", "n"}:
            raise ValueError(f"heterorl sets {', '.join(sorted(taken))} itself: remove it")
        return value

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"is not a regular expression: {error}") from None
        return value


class CodeRewardConfig(RewardBase):
    """Unit tests of Python code in bubblewrap; the prompt's answer holds them."""

    kind: Literal["code"] = "code"
    """Unit tests of a completion's Python code."""
    credit: Literal["all", "share"] = "all"
    """`all`: 1 if all tests pass, else 0; `share`: the share that passes."""
    needs_block: bool = True
    """Take code only from the last Python block; false: from the whole completion where it has none."""
    test_timeout_s: float = Field(default=2.0, gt=0, le=600)
    """Processor time of one test, or four times by the clock; a longer one fails. All tests together have
    task.reward_timeout_s."""
    memory_bytes: int = Field(default=512 << 20, ge=64 << 20)
    """Address space of each process of a test."""
    num_processes: int = Field(default=8, ge=1, le=256)
    """Processes and threads of a test."""
    work_bytes: int = Field(default=16 << 20, ge=1 << 16, le=1 << 32)
    """Bytes of files that a test may write, in memory."""
    output_bytes: int = Field(default=1 << 16, ge=1, le=1 << 24)
    """Bytes that a test may print, or twice the wanted output; more fails it."""
    python: str = ""
    """Interpreter of the tests; empty: heterorl's, without its packages."""
    shown: tuple[str, ...] = Field(default=(), max_length=16)
    """More directories that tests may read, such as an environment with numpy. Not part of the contract."""
    needs_answers: ClassVar[bool] = True


RewardConfig = Annotated[
    MatchRewardConfig | FunctionRewardConfig | HttpRewardConfig | JudgeRewardConfig | CodeRewardConfig,
    Field(discriminator="kind"),
]
