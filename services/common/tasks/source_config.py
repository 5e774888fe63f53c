"""Configuration of a source: its rows, columns of prompts, and rewards.

Tables `[[task.rewards]]` are told apart by `kind`.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, JsonValue, ValidationInfo, field_validator, model_validator

from heterorl.common.identity.signing import PublicKey
from heterorl.common.process.address import Url
from heterorl.common.process.config_file import DIRECTORY, Config, flatten, quoted

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
    """Rows to keep, by column: a value or a list of values."""
    at_least: dict[str, float] = Field(default_factory=dict)
    """Rows to keep, by column: smallest number."""
    at_most: dict[str, float] = Field(default_factory=dict)
    """Rows to keep, by column: largest number."""
    max_prompt_tokens: int = Field(default=0, ge=0)
    """Longest prompt with its template, tools and an environment's messages not counted; longer ones are dropped and
    logged. 0: no bound."""
    cache_dir: str = ""
    """hf, parquet: directory of downloads and Arrow files; empty: HF_HOME's."""

    @field_validator("where", "at_least", "at_most", mode="before")
    @classmethod
    def _check_bounds(cls, value: object, info: ValidationInfo) -> object:
        """Refuse tables, which TOML makes of names with dots.
        Refuse values of other kinds, since pydantic names each kind of the union as a key."""
        for name, each in value.items() if isinstance(value, dict) else ():
            if isinstance(each, dict):
                path = quoted(next(iter(flatten({name: each}))))
                raise ValueError(f"{name} is a table; put the name of a column with dots in quotes: {path} = ...")
            if info.field_name == "where" and not all(
                isinstance(one, Value) for one in (each if isinstance(each, list | tuple) else [each])
            ):
                raise ValueError(f"{name} must be text, a number, true or false, or a list of those, is {each!r:.60}")
        return value

    @model_validator(mode="after")
    def _check_columns(self) -> DataConfig:
        if self.answer and self.answer in (self.prompt, self.messages):
            raise ValueError("answer is the column of the prompt; name another column")
        if self.files and self.evaluation_split:
            raise ValueError("files and evaluation_split are both set; remove one of them")
        return self


ToolParser = Literal["auto", "hermes", "json"]


class SourceConfig(Config):
    """Prompts of one source, and their reward."""

    name: str = "arithmetic"
    """Dataset: `arithmetic`, `progression`, `reasoning_gym:NAME` (extra `gym`), `jsonl:PATH`, `parquet:PATH`,
    `hf:NAME@COMMIT[split]`, `hf:/DIRECTORY[split]`, `seeds` (one number a prompt, for environments without data) or
    `mixture` (of sources)."""
    data: DataConfig = DataConfig()
    """Columns and rows of a dataset."""
    system_prompt: str = ""
    """System message of prompts without one; needs use_chat_template."""
    digits: int = Field(default=3, ge=1, le=9)
    """arithmetic, progression: digits of each number."""
    terms: int = Field(default=34, ge=1, le=10_000)
    """progression: numbers of an answer; 34 of 3 digits are 103 tokens."""
    size: int = Field(default=10_000, ge=1)
    """reasoning_gym, seeds: training prompts."""
    evaluation_size: int = Field(default=512, ge=1)
    """Held-out prompts, at most half, where no file or split has them; arithmetic and progression: one in 19."""
    evaluation_path: str = ""
    """jsonl, parquet: file of held-out prompts; empty: some of the same file."""
    seed: int = Field(default=0, ge=0)
    """arithmetic, progression: order and held-out pairs; reasoning_gym: dataset; environment: episodes."""
    match: Literal["exact", "math_verify"] = "exact"
    """jsonl, parquet, hf: verifier of an answer, `exact` or `math_verify`. Rows that math_verify cannot read give no
    group."""
    tool_parser: ToolParser = "auto"
    """Form of tool calls: `hermes` (JSON in `<tool_call>` tags, as Qwen3), `json` (the whole answer, as Llama 3) or
    `auto` (by the model's template)."""
    reward: str = ""
    """`package.module:function`: f(prompt, completion, answer, columns by name) -> float or named parts, or TRL's
    f(prompts, completions, **columns) -> list; or a reward service's url. Equal files on every node."""
    rewards: tuple[RewardConfig, ...] = Field(default=(), max_length=MAX_REWARDS)
    """Named rewards, whose weighted sum is the reward; empty: task.reward, else the task's own score. Equal on every
    node."""
    reward_path: str = ""
    """Directory of the reward's module, relative to the configuration file; empty: its directory. Installed packages
    come first."""
    reward_timeout_s: float = Field(default=5.0, gt=0, le=3600)
    """Processor time of one reward, or four times by the clock (http, judge: clock time only); then the completion is
    lost. math_verify: at most 5 s, 40 times by the clock; reasoning_gym: half of it, at most 2 s; then reward 0."""
    reward_workers: int = Field(default=1, ge=1, le=64)
    """Worker processes for rewards; a sampler has 4 unless this is set."""
    environment: str = ""
    """`package.module:Class`, tools in `file.py`, `textarena:ID` (extra `games`), `openenv:URL` (extra `openenv`),
    `verifiers:NAME` (extra `verifiers`), `program:file.py:function` or `program:COMMAND`; gives the reward too. Equal
    files on every node. Empty: one turn."""
    environment_path: str = ""
    """Directory of the environment's module, file or program, relative to the configuration file; empty: its directory.
    Installed packages come first."""
    max_turns: int = Field(default=8, ge=1, le=1024)
    """Turns of an episode."""
    trajectory_s: float = Field(default=600.0, gt=0, le=86_400)
    """Clock time of an episode, generation included."""
    step_timeout_s: float = Field(default=5.0, gt=0, le=3600)
    """Processor time of a start, step or score, or four times by the clock; then the episode is lost. Agent programs:
    four times by the clock between two requests."""
    max_observation_chars: int = Field(default=16_384, ge=1, le=65_536)
    """Longest observation; a longer one fails the episode, a longer tool result is an error that the policy reads."""
    environment_memory_bytes: int = Field(default=1 << 30, ge=1 << 24)
    """Address space of an environment process after it is loaded; of an agent program: data of each process."""
    environment_workers: int = Field(default=64, ge=1, le=4096)
    """Environment processes, each with one episode, or 16 where the class shares them."""

    @field_validator("reward_path", "environment_path")
    @classmethod
    def _make_absolute(cls, value: str, info: ValidationInfo) -> str:
        # Other processes do not know the configuration file.
        if not info.data.get(str(info.field_name).removesuffix("_path")):
            return value
        return from_file(value, info)

    @property
    def uses_match(self) -> bool:
        """Whether the task's own score is the reward or one of them."""
        if self.reward or self.environment:
            return False
        return not self.rewards or any(each.kind == "match" for each in self.rewards)

    @property
    def needs_answers(self) -> bool:
        """Whether a row needs an answer; functions and services may do without."""
        if self.reward or self.environment:
            return False
        return not self.rewards or any(each.needs_answers for each in self.rewards)
