"""Early check of `model_dir`, copies of its files, config.json of exports.

The check comes before a library retries for a minute. A local directory costs no network; a hub id outside the cache
costs one request.
"""

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from heterorl.common.errors import ConfigError, ServiceUnreachable
from heterorl.common.process.hub import is_away
from heterorl.common.weights.arena import Dtype

ANSWER_S = 5.0
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_COPIED = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*", "*.model",
    "*.tiktoken", "tekken.json", "additional_chat_templates/*.jinja", "generation_config.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
"""Tokenizer, how a model is drawn from, and files without which engines refuse one that also reads images."""
TYPE_NAMES: dict[Dtype, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_ACTION = "name a Hugging Face directory (config.json, tokenizer, safetensors) or a hub id"


def check_model_dir(model_dir: str) -> None:
    """Check that this directory exists, or the hub has this model.
    Raises ConfigError; ServiceUnreachable: the hub does not answer."""
    if not model_dir:
        raise ConfigError("model_dir", "is not set", action=_ACTION)
    path = Path(model_dir)
    _check_readable(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError("model_dir", f"{model_dir} has no config.json", action=_ACTION)
        _check_shards(path)
        return
    if path.exists():
        raise ConfigError("model_dir", f"{model_dir} is a file, not a directory", action=_ACTION)
    if not _HUB_ID.fullmatch(model_dir):
        raise ConfigError("model_dir", f"there is no directory {model_dir}", action=_ACTION)
    if _is_cached(model_dir):
        return
    switches = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    if any(switch.upper() in {"1", "ON", "YES", "TRUE"} for switch in switches):
        problem = f"there is no directory {model_dir}, and no such model in the cache of the hub, which is switched off"
        raise ConfigError("model_dir", problem, action=_ACTION)
    _ask_hub(model_dir)


def _check_readable(path: Path) -> None:
    # safetensors writes files for their owner only, and calls a file that it may not read absent.
    try:
        closed = [each for each in (sorted(path.iterdir()) if path.is_dir() else []) if not os.access(each, os.R_OK)]
    except PermissionError:
        closed = [path]
    if lost := [each for each in closed if _leads_nowhere(each)]:
        problem = f"{lost[0]} is a link to {lost[0].readlink()}, which does not exist"
        raise ConfigError("model_dir", problem, action="copy the directory again with what its links name (cp -rL)")
    if closed:
        user = f"the user of this process ({os.geteuid()})"
        action = f"chmod -R a+rX {path}, and a+x for the directories above it"
        raise ConfigError("model_dir", f"{user} may not read {closed[0]}", action=action)


def _leads_nowhere(path: Path) -> bool:
    """Whether it is a link to a file that is not there."""
    try:
        path.stat()
    except FileNotFoundError:
        return path.is_symlink()
    except OSError:
        return False
    return False


def _check_shards(path: Path) -> None:
    """Check that all files of the index exist."""
    for whole in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{whole}.index.json"
        if (path / whole).is_file():
            return
        if index.is_file():
            try:
                named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (OSError, ValueError, LookupError, TypeError, AttributeError):
                # Its reader reports the problem.
                return
            missing = sorted(str(name) for name in named if not (path / str(name)).is_file())
            if missing:
                problem = f"{missing[0]} is not in {path}, and {index.name} names it"
                raise ConfigError("model_dir", problem, action="copy the directory again")
            return


def first_line(error: Exception) -> str:
    """A library error's first line; the rest advises its own users."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError as error:
        raise ConfigError("model_dir", f"there is no directory {name}", action=_ACTION) from error


def _ask_hub(name: str) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", endpoint=hub), timeout=ANSWER_S)
    except Exception as error:
        # Of the library and its HTTP client, which differ by release.
        problem = f"there is no directory {name}, and the hub at {urlsplit(hub).hostname}"
        if is_away(error):
            action = "correct it if it is mistyped; else restore the way to the hub, and the next start asks again"
            raise ServiceUnreachable(
                "model_dir", f"{problem} does not answer: {first_line(error)}", action=action
            ) from error
        problem = f"{problem} has no such model, or not for this user: {first_line(error)}"
        raise ConfigError("model_dir", problem, action="correct it, or set HF_TOKEN") from error


def copy_files(model_dir: str, out_dir: Path) -> None:
    """Copy tokenizer, generation config and processors as they are."""
    source = _local(model_dir, _COPIED)
    for path in (path for pattern in _COPIED for path in source.glob(pattern)):
        if path.is_file():
            target = out_dir / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)


def config_of(model_dir: str, model: Any, *, dtype: Dtype) -> str:
    """config.json of a model's published weights: the start model's, with what differs.

    Not as transformers 5 writes it: it leaves out keys that transformers 4 reads.
    """
    path = _local(model_dir, ("config.json",)) / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    kind, text = model.config.model_type, config.get("text_config") or {}
    # transformers opens some models without what reads images.
    if config.get("model_type") != kind and text.get("model_type") == kind:
        config, text = text, {}
    if "dtype" not in config:
        config["torch_dtype"] = ""
    # It names code that is not copied.
    config.pop("auto_map", None)
    config["architectures"] = [type(model).__name__]
    # A file may say of two tensors that they are tied.
    config["tie_word_embeddings"] = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    if "tie_word_embeddings" in text:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    for part in (config, *(value for key, value in config.items() if key.endswith("_config"))):
        if isinstance(part, dict):
            # transformers dequantised the start model.
            part.pop("quantization_config", None)
            part.update(dict.fromkeys(part.keys() & {"dtype", "torch_dtype"}, TYPE_NAMES[dtype]))
    return json.dumps(config, indent=2) + "\n"


def _local(model_dir: str, patterns: Sequence[str]) -> Path:
    """The directory, or the hub's cache with the files of these patterns."""
    from huggingface_hub import snapshot_download

    is_here = Path(model_dir).is_dir()
    return Path(model_dir if is_here else snapshot_download(model_dir, allow_patterns=[*patterns]))
