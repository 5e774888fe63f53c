"""The demonstration deletes what it wrote itself, and nothing else."""

import pytest

from heterorl.common.errors import ConfigError
from heterorl.demo.demo_config import MARKER, OWN, claim


def test_directory_of_the_user_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("years of work")

    with pytest.raises(ConfigError, match="--out: .* is not empty"), claim(tmp_path):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "thesis.txt"]


def test_own_results_are_replaced_and_the_users_files_beside_them_stay(tmp_path):
    with claim(tmp_path / "demo") as out:
        (out / "model").mkdir()
        (out / "model" / "weights").write_text("old")
        (out / "summary.json").write_text("{}")
        (out / "notes.txt").write_text("mine")
        (out / "mine").mkdir()

    with claim(out):
        assert sorted(path.name for path in out.iterdir()) == [MARKER, "mine", "notes.txt"]


def test_link_is_removed_and_what_it_points_to_stays(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("mine")
    with claim(tmp_path / "demo") as out:
        (out / "model").symlink_to(elsewhere)

    with claim(out):
        assert not (out / "model").is_symlink()
    assert (elsewhere / "file").exists()


def test_empty_and_new_directories_are_taken(tmp_path):
    (tmp_path / "empty").mkdir()

    for out in (tmp_path / "empty", tmp_path / "deep" / "new"):
        with claim(out):
            assert (out / MARKER).read_text().startswith("Written by")


def test_file_and_directory_in_use_are_refused(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="--out: .*not a directory"), claim(tmp_path / "file"):
        pass
    with pytest.raises(ConfigError, match="--out: cannot write to"), claim(tmp_path / "file" / "below"):
        pass
    with claim(tmp_path / "demo") as out:
        (out / "summary.json").write_text("{}")
        with pytest.raises(ConfigError, match="--out: another demo is running"), claim(out):
            pass
        assert (out / "summary.json").exists()


def test_results_are_names_inside_the_directory():
    assert all("/" not in name and not name.startswith(".") for name in OWN)
