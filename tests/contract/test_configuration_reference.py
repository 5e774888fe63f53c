"""The reference of configuration keys is the schemas', whole, and says something about each key."""

import re
from collections import Counter

import pytest

from docs import reference
from heterorl.common.process.config_file import flatten

EVERY = [
    (f"{service}:{section.path}.{key.name}", section, kind, key)
    for service, schema in reference.SERVICES.items()
    for section in reference.sections(schema)
    for kind, model in section.models.items()
    for key in reference.keys(model)
]


def test_committed_page_is_the_schemas():
    assert reference.PATH.read_text(encoding="utf-8") == reference.render(), "run python -m docs.generate"


def test_every_key_is_described():
    mute = []
    for name, section, kind, key in EVERY:
        # A kind means what its class says.
        text = section.models[kind].__doc__ or "" if key.name == "kind" and kind else key.meaning
        if len(text.split()) < 2 or not text.isascii() or not key.type:
            mute.append(name)

    assert mute == [], "these keys have no docstring"
    assert len(EVERY) > 100


@pytest.mark.parametrize("service", reference.SERVICES)
def test_page_has_every_key_that_a_default_configuration_has(service):
    shown = {
        f"{section.path}.{key.name}".lstrip(".")
        for section in reference.sections(reference.SERVICES[service])
        for model in section.models.values()
        for key in reference.keys(model)
    }
    # An array of tables: by default it is empty.
    shown |= {section.path.strip("[]") for section in reference.sections(reference.SERVICES[service])}

    assert set(flatten(reference.SERVICES[service]().model_dump(mode="json"))) <= shown


def test_every_table_stands_once_and_is_found_from_each_service():
    text = reference.render()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    of_services = dict(re.findall(r"^## (\w+)$(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL))
    anchors = {reference._slug(heading) for heading in headings}

    assert len(headings) == len(set(headings))
    for places in reference.tables_of():
        for place in places:
            if place.section.path:
                title = place.title if len(places) > 1 else f"### {place.service}: {place.title}\n"
                assert title in of_services[place.service]
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors
    tables = re.findall(r"^(?:\| `.*\n){2,}", text, re.MULTILINE)
    assert [table for table, count in Counter(tables).items() if count > 1] == []


def test_rows_state_type_default_bounds_and_unit():
    text = reference.render()

    assert "| `port` |" not in text
    row = next(line for line in text.splitlines() if line.startswith("| `learner_lease_s` |"))
    assert row.startswith("| `learner_lease_s` | float | `10.0` | > 0 | s | How long a silent learner")
    row = next(line for line in text.splitlines() if line.startswith("| `canary_threshold` |"))
    assert "| >= 0 | nats |" in row
    row = next(line for line in text.splitlines() if line.startswith("| `eps_high` |") and "0.28" in line)
    assert "`dapo`" in row
