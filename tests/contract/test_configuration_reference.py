"""The reference of configuration keys is the schemas', whole, and says something about each key."""

import functools
import re
from collections import Counter

import pytest

from docs import reference
from heterorl.common.process.config_file import flatten


@functools.cache
def page():
    return reference.render()


@functools.cache
def every():
    return [
        (f"{service}:{section.path}.{key.name}", section, kind, key)
        for service, schema in reference.SERVICES.items()
        for section in reference.sections(schema)
        for kind, model in section.models.items()
        for key in reference.keys(model)
    ]


def test_committed_page_is_the_schemas():
    assert reference.PATH.read_text(encoding="utf-8") == page(), "run python -m docs.generate"


def test_every_key_is_described():
    mute = []
    for name, section, kind, key in every():
        # A kind means what its class says.
        text = section.models[kind].__doc__ or "" if key.name == "kind" and kind else key.meaning
        if len(text.split()) < 2 or not text.isascii() or not key.type:
            mute.append(name)

    assert mute == [], "these keys have no docstring"
    assert len(every()) > 100


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
    text = page()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    of_services = dict(re.findall(r"^## (\w+)$(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL))
    anchors = {reference.slug(heading) for heading in headings}

    assert len(headings) == len(set(headings))
    for table in reference.tables_of():
        for service in table.services:
            title = table.link if len(table.services) > 1 else f"### {table.heading}\n"
            assert title in of_services[service]
        # The head of the page says which tables occur in others.
        titles = {re.sub(r"evaluation\.(?=task)|(?<=task)\.sources(?=\.)", "", place.title) for place in table.places}
        assert titles <= {table.title, "[evaluation.task]"}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors
    tables = re.findall(r"^(?:\| `.*\n){2,}", text, re.MULTILINE)
    assert [table for table, count in Counter(tables).items() if count > 1] == []


def test_every_key_has_a_row_with_its_default_values_and_meaning():
    rows: dict[str, list[str]] = {}
    for line in page().splitlines():
        if line.startswith("| `"):
            rows.setdefault(line.partition(" |")[0], []).append(line)
    lost = []
    for name, section, kind, key in every():
        if key.name == "kind" and kind:
            continue
        named = [row for name in (key.name, f"{section.path}.{key.name}") for row in rows.get(f"| `{name}`", ())]
        facts = [reference.escaped(fact) for fact in (key.default, key.bounds, key.unit, key.meaning)]
        if not any(all(fact in row for fact in facts) for row in named):
            lost.append(name)

    assert lost == []


def test_rows_state_default_bounds_unit_and_kinds():
    text = page()
    # Of several tables with one name, the first.
    rows = {line.split(" | ")[0]: line for line in reversed(text.splitlines()) if line.startswith("| `")}

    assert "| `port` |" not in text
    assert rows["| `learner_lease_s`"].startswith("| `learner_lease_s` | `10.0` | >= 0.3 | ")
    assert "| [0, 4096] |" in rows["| `metrics_nodes`"]
    assert "| >= 0 nats |" in rows["| `canary_threshold`"]
    assert "`0.28` (`dapo`, `bnpo`)" in rows["| `eps_high`"]
    assert rows["| `needs_block`"].endswith(" | `code` |")


def test_rows_of_one_name_and_meaning_are_one():
    one, two = (
        reference.Key(name="a", type="int", choices=(), default=default, bounds=bounds, unit="nats", meaning="A b.")
        for default, bounds in (("`1`", ">= 0"), ("`2`", "> 0"))
    )

    assert reference._rows({"x": [one], "y": [two], "z": [one]}) == [
        ("`a`", "`1`; `2` (`y`)", ">= 0 nats; > 0 nats (`y`)", "A b.", "")
    ]
    assert reference._rows({"x": [one], "y": [], "z": [one]})[0][-1] == "`x`, `z`"
    assert reference._rows({"w": [], "x": [one], "y": [one], "z": [one]})[0][-1] == "all except `w`"


def test_kinds_without_a_line_here_are_explained_on_their_page():
    explained = {
        section.path: (section.models, link)
        for schema in reference.SERVICES.values()
        for section in reference.sections(schema)
        if (link := reference._KINDS_EXPLAINED.get(section.path))
    }

    assert explained.keys() == reference._KINDS_EXPLAINED.keys()
    for models, link in explained.values():
        page = re.search(r"\(([\w.-]+)#", link)[1]
        text = (reference.PATH.parent / page).read_text(encoding="utf-8")
        assert [kind for kind in models if f"`{kind}`" not in text and f'kind = "{kind}"' not in text] == []
