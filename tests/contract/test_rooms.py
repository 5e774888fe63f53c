"""The house has rooms: no circle between them, each with users, each small, each saying where to begin."""

import functools
import re
from pathlib import Path

from docs import generate
from tests.support.import_graph import NAME, RESEARCH, SERVICES, between_rooms, circles, edges, modules

MODULES = modules() | modules(RESEARCH, "heterorl_research")
PACKAGES = sorted(name for name, path in MODULES.items() if path.name == "__init__.py")
MOST_MODULES = 14
COMMON = SERVICES / "common"


@functools.cache
def pairs_of_modules():
    return edges(MODULES)


def folder(package):
    return MODULES[package].parent


def files_in(directory):
    return sorted(path.name for path in directory.glob("*.py") if path.name != "__init__.py")


def rooms_of(directory):
    return sorted(path.parent.name for path in directory.glob("*/__init__.py"))


def users(room, pairs):
    """Top-level packages beside `common` that import something of one of its rooms."""
    inside = f"{NAME}.common.{room}"
    return {
        first.split(".")[1]
        for first, second in pairs
        if (second == inside or second.startswith(inside + ".")) and first.split(".")[1:2] not in ([], ["common"])
    }


def named_files(package, text):
    """Words in back-ticks that are a file or a folder of the package, or lead to one below it."""
    words = [word.removesuffix(".py") for word in re.findall(r"`([\w/.]+)`", text)]
    return [word for word in words if (folder(package) / word).is_dir() or (folder(package) / f"{word}.py").is_file()]


def test_no_circle_between_the_rooms_of_a_package():
    pairs = pairs_of_modules()

    assert {package: found for package in PACKAGES if (found := circles(between_rooms(pairs, package)))} == {}


def test_a_circle_is_found_whatever_is_between():
    pairs = {("h.p.a.x", "h.p.b.y"), ("h.p.b.z", "h.p.c"), ("h.p.c", "h.p.a"), ("h.p.d", "h.p.a.x"), ("h.q", "h.p.a")}

    assert circles(between_rooms(pairs, "h.p")) == [["h.p.a", "h.p.b", "h.p.c"]]
    assert circles(between_rooms(pairs - {("h.p.c", "h.p.a")}, "h.p")) == []


def test_common_has_rooms_and_two_files():
    assert files_in(COMMON) == ["api.py", "errors.py"]


def test_a_room_of_common_has_two_users():
    rooms = rooms_of(COMMON)

    assert len(rooms) > 10
    pairs = pairs_of_modules()

    assert {room: found for room in rooms if len(found := users(room, pairs)) < 2} == {}


def test_users_are_counted_outside_common():
    pairs = {(f"{NAME}.sampler.x", f"{NAME}.common.a.b"), (f"{NAME}.common.c", f"{NAME}.common.a.b")}

    assert users("a", pairs) == {"sampler"}
    assert users("c", pairs) == set()


def test_a_folder_shows_few_modules():
    assert {package: count for package in PACKAGES if (count := len(files_in(folder(package)))) > MOST_MODULES} == {}


def test_a_wing_says_which_file_to_open():
    first = {package: MODULES[package].read_text().partition('"""')[2].partition('"""')[0] for package in PACKAGES}

    assert [package for package in PACKAGES if not named_files(package, first[package])] == []


def test_the_map_names_a_file_to_open_first_for_every_folder():
    assert [folder for folder, _, first in generate.packages() if not first] == []


def test_a_file_that_is_not_there_is_no_way_in():
    assert named_files(f"{NAME}.common", "Open `api.py`, then `types`, `wire/common_messages`.") == [
        "api",
        "types",
        "wire/common_messages",
    ]
    assert named_files(f"{NAME}.common", "Open `codec`, or `heterorl run`.") == []


def test_every_folder_with_modules_is_a_package():
    folders = {path.parent for path in MODULES.values()}

    assert [folder for folder in sorted(folders) if not Path(folder, "__init__.py").is_file()] == []
