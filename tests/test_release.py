"""Requirements of a release: one version, the changelog's format, known licences, and the example for GitHub."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import saccade
from release import licences
from release.check import RESERVED_HOST

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = {name: tomllib.loads((ROOT / name / "pyproject.toml").read_text()) for name in (".", "saccade")}
SECTIONS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
PERMISSIVE = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "ISC", "LLVM-exception", "MIT",
    "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib",
}  # fmt: skip


def test_the_version_is_in_one_place() -> None:
    spec = importlib.util.spec_from_file_location("setup_of_the_server", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    assert setup.version() == saccade.__version__ == version("saccade") == version("saccade-server")
    for project in PROJECTS.values():
        assert "version" in project["project"]["dynamic"] and "version" not in project["project"]
    texts = [(ROOT / name).read_text() for name in ("pyproject.toml", "saccade/pyproject.toml", "setup.py")]
    assert not any(re.search(rf"\b{re.escape(saccade.__version__)}\b", text) for text in texts)


def test_metadata_of_both_packages_agree() -> None:
    for name, project in PROJECTS.items():
        said = project["project"]
        assert said["license"] == "Apache-2.0"
        assert (ROOT / name / said["license-files"][0]).read_text() == (ROOT / "LICENSE").read_text()
        assert (ROOT / name / said["readme"]).is_file()
        urls = said.get("urls", {})
        assert [url for url in urls.values() if RESERVED_HOST.search(url)] == [], "placeholders are dead links"
        assert urls == PROJECTS["."]["project"].get("urls", {})


@pytest.mark.parametrize(
    ("url", "reserved"),
    [
        ("https://saccade.example", True),
        ("https://saccade.example/docs", True),
        ("https://docs.example.org/page", True),
        ("https://example.com:443", True),
        ("https://example.io/page", False),
        ("https://github.com/somebody/example.com", False),
    ],
)
def test_placeholders_are_recognised(url: str, reserved: bool) -> None:
    assert bool(RESERVED_HOST.search(url)) == reserved


def test_no_page_of_a_package_index_links_to_a_placeholder() -> None:
    """A package index shows the READMEs as descriptions."""
    for name, project in PROJECTS.items():
        assert not RESERVED_HOST.search((ROOT / name / project["project"]["readme"]).read_text()), name


def test_the_programs_of_a_release_are_pinned() -> None:
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    asked = PROJECTS["."]["project"]["optional-dependencies"]["release"]
    assert {Requirement(each).name for each in asked} <= pinned


def problems(changelog: str) -> list[str]:
    """What Keep a Changelog 1.1 would not have: headings, their order, dates, and sections."""
    found = []
    if not changelog.startswith("# Changelog\n"):
        found.append("the title")
    releases = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    titles = [release.splitlines()[0] for release in releases]
    if titles[:1] != ["[Unreleased]"]:
        found.append(f"the first heading is {titles[:1]}")
    versions = []
    for title in titles[1:]:
        if match := re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-(0[1-9]|1[0-2])-([0-2]\d|3[01])( \[YANKED\])?", title):
            versions.append(Version(match[1]))
        else:
            found.append(f"heading {title!r}")
    if versions != sorted(set(versions), reverse=True):
        found.append("the order of versions")
    for title, release in zip(titles, releases):
        parts = re.split(r"^### ", release, flags=re.MULTILINE)[1:]
        names = [part.splitlines()[0] for part in parts]
        if names != [name for name in SECTIONS if name in names]:
            found.append(f"sections of {title}: {names}")
        for name, part in zip(names, parts):
            lines = part.rstrip("\n").splitlines()[1:]
            if not lines or not all(line.startswith(("- ", "  ")) for line in lines):
                found.append(f"{name} of {title} is no list")
    return found


def test_the_changelog_keeps_its_form() -> None:
    assert problems((ROOT / "CHANGELOG.md").read_text()) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("## Unreleased\n", "first heading"),
        ("## [Unreleased]\n\n## [1.0] - 2026-01-01\n", "heading '\\[1.0\\]"),
        ("## [Unreleased]\n\n## [1.0.0] - 2026-13-01\n", "2026-13-01"),
        ("## [Unreleased]\n\n## [1.0.0] - 2026-01-01\n\n## [1.1.0] - 2026-02-01\n", "order of versions"),
        ("## [Unreleased]\n\n### Fixed\n- a\n\n### Added\n- b\n", "sections of"),
        ("## [Unreleased]\n\n### New\n- a\n", "sections of"),
        ("## [Unreleased]\n\n### Added\n- a\n\n- b\n", "Added of .* no list"),
        ("## [Unreleased]\n\n### Added\n", "Added of .* no list"),
    ],
)
def test_other_forms_are_noticed(text: str, problem: str) -> None:
    (found,) = problems(f"# Changelog\n\n{text}")
    assert re.search(problem, found)


def test_a_changelog_with_releases_is_fine() -> None:
    assert not problems(
        "# Changelog\n\nWords.\n\n## [Unreleased]\n\n## [1.10.0] - 2026-02-28\n\n### Added\n- a\n  more\n\n"
        "### Fixed\n- b\n\n## [1.9.1] - 2026-01-31 [YANKED]\n\n### Security\n- c\n"
    )


def test_every_package_that_the_server_brings_is_listed_with_its_licence() -> None:
    rows = re.findall(r"^\| (\S+) \| (.+) \| (.+) \|$", licences.PAGE.read_text(), re.MULTILINE)
    listed = {name: spdx for name, spdx, _ in rows if name not in ("package", "---")}
    here = {name: spdx for name, (spdx, _) in licences.installed().items()}
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    if version("torch").partition("+")[0] != pinned[1]:
        here["torch"] = listed["torch"]  # its versions declare different licences
    assert set(here) <= set(listed), "run python -m release.licences"
    assert {name: listed[name] for name in here} == here, "run python -m release.licences"
    for name, spdx in listed.items():
        words = set(re.findall(r"[\w.-]+", spdx)) - {"AND", "OR", "WITH"}
        assert words <= PERMISSIVE, f"{name}: {spdx}"


def test_the_example_for_github_calls_what_contributors_call() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow[True].keys() == {"push", "pull_request"}  # YAML 1.1 parses `on` as true
    commands = {job: [s["run"] for s in of["steps"] if "run" in s] for job, of in workflow["jobs"].items()}
    assert commands == {"test": [".ci/run", "make release-check"]}  # the second for tags, with every instruction set


def test_ci_makes_what_contributors_are_told() -> None:
    lines = re.findall(r"^make (.*)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    targets = [word for line in lines for word in re.findall(r"(?<!\S)[a-z][a-z-]+", line)]
    assert targets == ["libraries", "lint", "docs", "test", "release-check"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    assert f"`.ci/run` is `make {' '.join(targets)}`" in (ROOT / "CONTRIBUTING.md").read_text()
