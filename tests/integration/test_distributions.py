"""What is built of the sources: a wheel, a source distribution, a link to a working copy; all bring one name."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from heterorl import __version__
from tests.support.foreign import foreign_project, run
from tests.support.import_graph import modules

ROOT = Path(__file__).parents[2]
RESEARCH = ROOT / "research"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = {path.relative_to(ROOT / "services") for path in (ROOT / "services").rglob("*.py*") if path.suffix != ".pyc"}


def build(kind, source, directory):
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(directory)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = directory.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def linked(tmp_path_factory):
    """What `pip install -e .` installs."""
    directory = tmp_path_factory.mktemp("editable")
    code = f"import hatchling.build as build; build.build_editable({str(directory)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (built,) = directory.iterdir()
    return built


def unpacked(sdist, directory):
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    (source,) = directory.iterdir()
    return source


def held(wheel, package="heterorl"):
    """Files of the package in a wheel, and the top-level names beside the metadata."""
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    top = {path.parts[0] for path in names if not path.parts[0].endswith(".dist-info")}
    return {path.relative_to(package) for path in names if path.parts[0] == package}, top


def installed(built, directory):
    """An environment of its own with the distribution, whose dependencies are those of the tests."""
    run(sys.executable, "-m", "venv", "--without-pip", str(directory))
    python = directory / "bin" / "python"
    packages = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "--python", str(python), "install", *options, "--force-reinstall", str(built))
    return directory / "bin", packages


def test_a_wheel_holds_everything_under_one_name(wheel):
    files, top = held(wheel)

    assert top == {"heterorl"}
    assert {path for path in files if path.suffix in (".py", ".pyi")} == SOURCES
    assert Path("py.typed") in files


def test_research_is_a_wheel_of_its_own(tmp_path):
    built = build("wheel", RESEARCH, tmp_path)
    files, top = held(built, "heterorl_research")
    said = zipfile.ZipFile(built).read(f"heterorl_research-{__version__}.dist-info/METADATA").decode()

    assert top == {"heterorl_research"}
    assert {path for path in files if path.suffix == ".py"} == {
        path.relative_to(RESEARCH) for path in modules(RESEARCH).values()
    }
    assert Path("lab/experiments/quick.toml") in files
    assert f"Requires-Dist: heterorl[learner,report,sampler]=={__version__}" in said


@pytest.mark.slow
def test_a_source_distribution_builds_the_same_wheel(sdist, wheel, tmp_path):
    source = unpacked(sdist, tmp_path / "source")

    assert held(build("wheel", source, tmp_path / "wheel")) == held(wheel)


@pytest.mark.slow
def test_what_the_images_copy_builds_the_same_wheel(wheel, tmp_path):
    stage = (ROOT / "deploy" / "Dockerfile").read_text().partition(" AS sources\n")[2].partition("\nFROM ")[0]
    copied = [line.split()[1:] for line in stage.splitlines() if line.startswith("COPY ")]
    source = tmp_path / "src"
    source.mkdir()
    for *names, target in copied:
        for name in names:
            place = source / target
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, place, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, place)

    assert held(build("wheel", source, tmp_path / "wheel")) == held(wheel)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist", "linked"])
def test_installed_program_and_package_are_ours_beside_foreign_services(kind, tmp_path, monkeypatch, request):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    programs, packages = installed(request.getfixturevalue(kind), tmp_path / "environment")
    code = "import heterorl, heterorl.coordinator.coordinator_app; print(heterorl.__file__)"
    project = tmp_path / "project"
    project.mkdir()

    with foreign_project(project, monkeypatch):
        # The console script as the installer wrote it.
        assert run(str(programs / "heterorl"), "--version") == f"heterorl {__version__}\n"
        assert "heterorl keys" in run(str(programs / "python"), "-m", "heterorl", "keys", "--help")
        place = run(str(programs / "python"), "-c", code).strip()

    base = ROOT / "src" if kind == "linked" else packages
    assert place == os.fspath(base / "heterorl" / "__init__.py")


def test_metadata_says_what_it_is_and_invents_no_address(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    said = HeaderParser().parsestr(archive.read(name).decode())

    assert (said["Name"], said["Version"], said["License-Expression"]) == ("heterorl", __version__, "Apache-2.0")
    assert said["Author"] == said["Maintainer"] == "The heterorl authors"
    assert said["Keywords"]
    # Where the sources are published is not known yet: no link may lead to another's page.
    assert said.get_all("Project-URL") is None
    classifiers = pytest.importorskip("trove_classifiers").classifiers
    assert set(said.get_all("Classifier")) <= classifiers


def test_checkers_of_types_layers_and_coverage_name_what_is_installed():
    tools = PROJECT["tool"]

    assert PROJECT["project"]["scripts"] == {"heterorl": "heterorl.entry:main"}
    assert tools["importlinter"]["root_packages"] == ["heterorl", "heterorl_research"]
    assert tools["mypy"]["files"] == ["src/heterorl", "src/heterorl_research", "benchmarks", "campaigns"]
    assert tools["hatch"]["build"]["targets"]["wheel"]["sources"] == {"services": "heterorl"}
    assert (ROOT / "src" / "heterorl").resolve() == ROOT / "services"
    assert (ROOT / "src" / "heterorl_research").resolve() == ROOT / "research"
    # Coverage knows files by their real place, to which the link leads.
    assert tools["coverage"]["run"]["source"] == ["services", "research"]
    assert all(any(ROOT.glob(name)) for name in tools["coverage"]["run"]["omit"])
    named = [
        module for each in tools["mypy"]["overrides"] for module in each["module"] if module.startswith("heterorl")
    ]
    assert all((ROOT / "src" / name.removesuffix(".*").replace(".", "/")).is_dir() for name in named)
