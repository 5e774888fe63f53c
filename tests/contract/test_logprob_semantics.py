"""What a log-prob means is said once: one file divides logits, one asks which temperature a run's log-probs have."""

import ast
import re
from pathlib import Path

import pytest

ROOTS = [Path(__file__).parents[2] / folder for folder in ("services", "research/lab")]
SOURCES = {
    str(path.relative_to(root)): text
    for root in ROOTS
    for path in sorted(root.rglob("*.py"))
    if re.search("logits|temperature|logprob_?mode", (text := path.read_text()).lower())
}
"""Those that have a word of what is looked for."""
PROJECTION = "common/model/logprobs.py"
MAY_DIVIDE = {
    PROJECTION: "the projection itself, and its gradient",
    "theory/samples.py": "a softmax policy of the theory, of which no run's log-prob is made",
}
MAY_ASK = {
    "common/types/common.py": "where the temperature of log-probs is decided",
    "sampler/sampler_config.py": "vLLM's own modes, to which the contract's are mapped",
}
DIVISIONS = {"div", "div_", "divide", "divide_", "true_divide", "true_divide_"}


def _names(node):
    """All names in an expression, as they are written."""
    found = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
    return " ".join(found + [part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)]).lower()


def _operands(node):
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return node.left, [node.right]
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return node.target, [node.value]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DIVISIONS:
        return node.func.value, node.args
    return None


def _divisions(source):
    """Lines on which logits are divided, or something is divided by a temperature."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        operands = _operands(node)
        if operands is None:
            continue
        over, by = operands
        if "logits" in _names(over) or any("temperature" in _names(part) for part in by):
            lines.append(node.lineno)
    return lines


def _questions(source):
    """Lines on which a log-prob's mode is compared."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Compare) and ("logprobmode" in _names(node) or "logprob_mode" in _names(node))
    ]


def test_one_file_divides_logits_and_one_knows_what_raw_means():
    dividing = {name: lines for name, source in SOURCES.items() if (lines := _divisions(source))}
    asking = {name: lines for name, source in SOURCES.items() if (lines := _questions(source))}

    # Every exception is needed as well.
    assert set(dividing) == set(MAY_DIVIDE), f"{PROJECTION} has `tempered`: {dividing}"
    assert set(asking) == set(MAY_ASK), f"SamplingSemantics has `logprob_temperature`: {asking}"


@pytest.mark.parametrize(
    "source",
    [
        "scaled = logits / sampling.temperature",
        "scaled = logits_CV / shown",
        "logits[start - 1 :] /= sampling.temperature",
        "x.div_(temperature)",
        "torch.div(x, self._temperature)",
        "inverse = 1.0 / temperature",
        "logits.float().true_divide(shown)",
    ],
)
def test_the_guard_finds_a_division(source):
    assert _divisions(source)


@pytest.mark.parametrize("source", ["raw = mode is LogprobMode.RAW", "sampling.logprob_mode == other"])
def test_the_guard_finds_a_question(source):
    assert _questions(source)


@pytest.mark.parametrize("source", ["rows = CHUNK_LOGITS // width", "share = tokens / seconds", "a = logits * 2"])
def test_the_guard_lets_other_arithmetic_be(source):
    assert not _divisions(source)
