"""Rewards by name and weight: what `[[task.rewards]]` may say, one table a reward, told apart by `kind`."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from heterorl.common.identity.signing import PublicKey
from heterorl.common.process.address import Url
from heterorl.common.process.config import DIRECTORY, Config

MAX_REWARDS = 16
"""Of one task."""


class RewardBase(Config):
    """What every reward has."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the reward in curves, samples and journals."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """What its value is multiplied by in the reward; 0 measures without rewarding, a negative weight punishes."""

    @property
    def needs_answers(self) -> bool:
        """Whether a row without an answer can have no value."""
        return False


class MatchRewardConfig(RewardBase):
    """The task's own score: of jsonl as task.match says, of every other task its verifier."""

    kind: Literal["match"] = "match"
    """The task's own score."""

    @property
    def needs_answers(self) -> bool:
        """A score compares with the answer."""
        return True


class FunctionRewardConfig(RewardBase):
    """A Python function; see task.reward."""

    kind: Literal["function"] = "function"
    """A Python function."""
    function: str
    """`package.module:function`: f(prompt, completion, answer) -> float or named parts, which are shown as
    NAME/PART; or another form of task.reward."""
    directory: str = ""
    """Directory of its package or module, taken from the configuration file's directory on; empty is that directory
    itself."""

    @field_validator("directory")
    @classmethod
    def _make_absolute(cls, value: str, info: ValidationInfo) -> str:
        return from_file(value, info)


def from_file(value: str, info: ValidationInfo) -> str:
    """A path that is meant from the configuration file's directory on, made absolute.

    Here, where the file is known: other processes are given the result.
    """
    return str(Path((info.context or {}).get(DIRECTORY, "")).absolute() / value)


class RemoteRewardBase(RewardBase):
    """What every reward has that somebody else computes."""

    url: Url = Field(pattern=r"^https?://[^\s]+$", max_length=2048)
    """Where it is asked. Not part of the contract: sites may ask servers of their own."""
    low: float = Field(default=0.0, allow_inf_nan=False)
    """Least value that it may give; another one is an error."""
    high: float = Field(default=1.0, allow_inf_nan=False)
    """Largest value that it may give; another one is an error."""
    api_key_env: str = Field(default="", pattern=r"^[A-Za-z_0-9]*$", max_length=128)
    """Environment variable of the key that is sent as a bearer token; empty: none, or that of api_key_file."""
    api_key_file: str = ""
    """File of the key, taken from the configuration file's directory on."""
    ca_file: str = ""
    """File of certificate authorities (PEM) of the server; empty takes the system's."""

    @field_validator("api_key_file", "ca_file")
    @classmethod
    def _make_absolute(cls, value: str, info: ValidationInfo) -> str:
        return from_file(value, info) if value else value

    @model_validator(mode="after")
    def _has_a_range(self) -> RemoteRewardBase:
        if not self.low < self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        return self


class HttpRewardConfig(RemoteRewardBase):
    """A service that is asked by HTTP POST; docs/rewards.md has the two JSON documents."""

    kind: Literal["http"] = "http"
    """A service that is asked by HTTP POST."""
    batch: Literal["completion", "group"] = "completion"
    """Whether each completion is asked for as it ends, or all of a group together when the last one has ended."""
    version: str = Field(default="", max_length=128)
    """A word for what the service computes, part of the contract; change it when the service changes."""
    signed_by: tuple[PublicKey, ...] = ()
    """Public keys with one of which the service signs each value; a learner then trusts no site. Not part of the
    contract. Not with batch `group`: a signature is of one completion, and a site could choose the others."""

    @model_validator(mode="after")
    def _signs_completions(self) -> HttpRewardConfig:
        if self.signed_by and self.batch == "group":
            raise ValueError(
                'signed_by: a signature is of one completion, and says nothing of a group: set batch to "completion"'
            )
        return self


class JudgeRewardConfig(RemoteRewardBase):
    """A language model that judges each completion, over the chat completions of OpenAI's API."""

    kind: Literal["judge"] = "judge"
    """A language model that judges."""
    model: str = Field(min_length=1, max_length=256)
    """Name of the model."""
    rubric: str = Field(default="", max_length=1 << 16)
    """What the judge is asked; `{prompt}`, `{completion}` and `{answer}` stand for texts. Empty: see rubric_file."""
    rubric_file: str = ""
    """File of the rubric, taken from the configuration file's directory on."""
    field: str = Field(default="score", min_length=1, max_length=128)
    """Field of the last JSON object in the judge's words that holds the score. The reward's value is where it lies
    between low and high, the judge's scale: 0 to 1."""
    pattern: str = Field(default="", max_length=1024)
    """Regular expression whose last match holds the score, in its first group; not empty, it stands for field."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Of the judge."""
    max_tokens: int = Field(default=512, ge=1, le=1 << 16)
    """Longest words of the judge, tokens."""
    cache_file: str = "runs/judge.sqlite"
    """SQLite file of what was judged, by digest of rubric, model, prompt, answer and completion; it may be deleted at
    any time. Processes of one machine share it, and requests_per_minute with it."""
    cache_entries: int = Field(default=1_000_000, ge=1)
    """Scores that are kept; the oldest give way."""
    requests_per_minute: float = Field(default=0.0, ge=0)
    """Most questions a minute to this url of all processes with this cache_file; 0 is no bound."""

    @property
    def needs_answers(self) -> bool:
        """Whether the rubric shows the answer."""
        text = self.rubric
        if self.rubric_file:
            # A file that cannot be read is refused where the judge is made.
            with suppress(OSError, UnicodeDecodeError):
                text = Path(self.rubric_file).read_text(encoding="utf-8")
        return "{answer}" in text

    @field_validator("rubric_file")
    @classmethod
    def _make_rubric_absolute(cls, value: str, info: ValidationInfo) -> str:
        return from_file(value, info) if value else value

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from None
        return value


class CodeRewardConfig(RewardBase):
    """Unit tests of the Python code in a completion, inside bubblewrap; the prompt's answer holds the tests."""

    kind: Literal["code"] = "code"
    """Unit tests of the Python code in a completion."""
    credit: Literal["all", "share"] = "all"
    """1 where all tests pass and else 0, or the share of tests that pass."""
    needs_block: bool = True
    """Whether code counts only inside a block of three back-ticks or tildes, of which the last one is taken; false
    takes the whole completion where there is none."""
    test_timeout_s: float = Field(default=2.0, gt=0, le=600)
    """Processor time of one test, seconds, from when its sandbox is built; one that takes more, or four times as long
    by the clock, has failed. All tests of a completion have task.reward_timeout_s together."""
    memory_bytes: int = Field(default=512 << 20, ge=64 << 20)
    """Largest address space of each process of a test, bytes."""
    num_processes: int = Field(default=8, ge=1, le=256)
    """Most processes and threads of a test at once."""
    work_bytes: int = Field(default=16 << 20, ge=1 << 16, le=1 << 32)
    """Most that a test may write to its files, bytes; they are in memory and gone with it."""
    output_bytes: int = Field(default=1 << 16, ge=1, le=1 << 24)
    """Most that a test may print, bytes; one that prints more has failed."""
    python: str = ""
    """Interpreter of the tests; empty: heterorl's own without its packages."""
    shown: tuple[str, ...] = Field(default=(), max_length=16)
    """Further directories that tests may read, such as those of an environment with numpy. They are not part of the
    contract."""

    @property
    def needs_answers(self) -> bool:
        """The answer holds the tests."""
        return True


RewardConfig = Annotated[
    MatchRewardConfig | FunctionRewardConfig | HttpRewardConfig | JudgeRewardConfig | CodeRewardConfig,
    Field(discriminator="kind"),
]
