"""A text of a peer stays within the line that quotes it."""

import logging

import pytest

from heterorl.common.process.logs import ConsoleFormatter, one_line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain", "plain"),
        ("a\n2026 CRITICAL forged", "a\\n2026 CRITICAL forged"),
        ("\x1b[2Jgone\r\x00", "\\x1b[2Jgone\\r\\x00"),
        ("right to left \u202e", "right to left \\u202e"),
        ("caf\xe9", "caf\xe9"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text, line):
    assert one_line(text) == line


def test_record_is_one_line_and_its_traceback_is_kept():
    try:
        raise ValueError("inner")
    except ValueError as error:
        record = logging.LogRecord(
            "n", logging.INFO, __file__, 1, "engine %s", ("hf\nforged",), (ValueError, error, error.__traceback__)
        )

    lines = ConsoleFormatter("%(levelname)s: %(message)s").format(record).splitlines()

    assert lines[0] == "INFO: engine hf\\nforged"
    assert lines[-1] == "ValueError: inner"
