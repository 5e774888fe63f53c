"""From `loss.function` to the function: where it is looked for, and whether it takes its options."""

from __future__ import annotations

import functools
import inspect
import json
from typing import Any

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.rewards.worker import LoadError, load_function
from heterorl.learner.loss.custom import KEY, CustomLoss
from heterorl.learner.loss.kinds_custom import CustomLossConfig

_EXAMPLE = "for example mylosses:loss, a function loss(batch, **options) in mylosses.py"
_PLACES = (
    "put the package or module beside the configuration file, name its directory in loss.directory, or install it into "
    "this environment"
)
_OWN = ("batch", "step")


def load_loss(config: CustomLossConfig) -> CustomLoss:
    """The function that a configuration names; the same object for the same configuration.

    Raises:
        ConfigError: it cannot be found, imported or called, or takes other options.
    """
    return _load(config.function, config.directory, json.dumps(config.options, sort_keys=True), config.reads_reference)


@functools.cache
def _load(path: str, directory: str, options_json: str, reads_reference: bool) -> CustomLoss:
    module, _, name = path.partition(":")
    if not all(word.isidentifier() for word in [*module.split("."), name]):
        raise ConfigError(KEY, f"{path!r} is not package.module:function", action=_EXAMPLE)
    try:
        function = load_function(module, name, directory)
    except LoadError as error:
        if error.kind == "place":
            problem = f"{error}, nor among the packages that are installed here"
            raise ConfigError(KEY, problem, action=_PLACES) from error
        raise ConfigError(KEY, f"{path}: {error}", action="correct the module and start again") from error
    options: dict[str, Any] = json.loads(options_json)
    takes_step = _check_signature(path, function, options)
    return CustomLoss(
        name=path, function=function, options=options, takes_step=takes_step, reads_reference=reads_reference
    )


def _check_signature(path: str, function: Any, options: dict[str, Any]) -> bool:
    """Whether it takes the whole step."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(KEY, f"{path} has no signature", action="name a Python function") from error
    takes_step = "step" in signature.parameters
    if taken := sorted(options.keys() & set(_OWN)):
        raise ConfigError("loss.options", f"{', '.join(taken)} is given by the learner", action="remove it")
    try:
        signature.bind(None, **({"step": None} if takes_step else {}), **options)
    except TypeError as error:
        names = ", ".join(name for name in signature.parameters if name not in _OWN) or "no options"
        problem = f"{path} cannot be called with them: {error}; its parameters are {names}"
        raise ConfigError("loss.options", problem, action="correct loss.options or the function") from error
    return takes_step
