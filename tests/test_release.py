# SPDX-License-Identifier: Apache-2.0
"""What a release says of itself is the same in all places, as an index shows it too, and its forms are shown."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe.versions import RUN, SUPPORTED, VERSION

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[1]
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
PAGE = runpy.run_path(str(ROOT / "tools" / "package_page.py"))
README = (ROOT / "README.md").read_text()
ADDRESS = "https://forge.example/owner/name"
ANY_LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")
LINK = re.compile(r"\]\((?![a-z]+:)([^)\s#]+)(?:#[^)\s]*)?\)")


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_the_changelog_has_a_section_for_each_release_and_the_newest_is_this_one() -> None:
    titles = re.findall(r"(?m)^## (\S+), (.+)$", (ROOT / "CHANGELOG.md").read_text())
    assert titles[0][0] == VERSION
    releases = [numbers(version) for version, _ in titles]
    assert releases == sorted(releases, reverse=True)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d|unreleased|never published", when) for _, when in titles)


def test_a_citation_names_this_version_and_the_paper() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited), "what the format asks for"
    assert (cited["version"], cited["license"]) == (VERSION, "Apache-2.0")
    (paper,) = cited["references"]
    assert f"[FSMoE](https://doi.org/{paper['doi']}) (ASPLOS'25)" in (ROOT / "README.md").read_text()
    assert f'"https://doi.org/{paper["doi"]}"' in (ROOT / "setup.py").read_text()


def test_the_page_of_versions_has_the_ranges_that_are_checked() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    rows = {row[1].lower(): row for row in (line.split("|") for line in page.splitlines()) if len(row) > 5}
    rows = {name.strip(): [cell.strip() for cell in row] for name, row in rows.items()}
    for name, supported in SUPPORTED.items():
        assert rows[name][2] == f"`{supported}`"
        if name == "deepspeed":
            assert re.search(rf"\b{re.escape(supported.removeprefix('=='))}\b", rows[name][3])
    pairs = [line.split("|")[1:3] for line in page.splitlines() if re.match(r"\| 3\.\d+ \|", line)]
    assert {(python.strip(), torch.split()[0]) for python, torch in pairs} == set(RUN)


def test_security_reports_are_asked_for_the_version_that_is_mended_and_pages_beside_the_docs_lead_somewhere() -> None:
    minor = ".".join(VERSION.split(".")[:2])
    assert f"the newest minor version, {minor}," in (ROOT / "SECURITY.md").read_text()
    for page in ("SECURITY.md", "CHANGELOG.md"):
        targets = LINK.findall((ROOT / page).read_text())
        assert targets
        assert all((ROOT / each).is_file() for each in targets), page


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_form_for_issues_is_one_that_is_shown(form: Path) -> None:
    read: dict[str, Any] = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= set(read)
    fields = [each for each in read["body"] if each["type"] != "markdown"]
    assert {each["type"] for each in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert len({each["id"] for each in fields}) == len(fields)
    for each in fields:
        assert each["attributes"]["label"]
        # Words that YAML takes for truth values would not be shown as they are written.
        assert all(isinstance(option, str) for option in each["attributes"].get("options", ()))


def test_forms_and_changes_name_files_and_commands_that_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in [*FORMS, ROOT / ".github" / "pull_request_template.md"]:
        text = page.read_text()
        for path in re.findall(r"\b(?:docs|tests|benchmarks|config)/[\w/.]+\w|[A-Z]{5,}\.md", text):
            assert (ROOT / path).exists() or (ROOT / "ds_fsmoe" / path).exists(), f"{page.name}: {path}"
        for target in re.findall(r"`make ([\w-]+)`", text):
            assert re.search(rf"(?m)^{target}:", makefile), target


# ---- what a package index shows of the README


def test_with_an_address_every_link_is_absolute_and_leads_to_a_file_of_this_version() -> None:
    assert PAGE["addresses"]("") == {}
    assert all(each.startswith(ADDRESS) for each in PAGE["addresses"](ADDRESS).values())
    shown = PAGE["package_page"](README, VERSION, ADDRESS)
    links = [(is_picture, target) for is_picture, target in ANY_LINK.findall(shown) if not target.startswith("#")]
    ours = [each for each in links if "doi.org" not in each[1]]
    assert len(ours) > 20
    for is_picture, target in ours:
        below = f"{ADDRESS}/{'raw' if is_picture else 'blob'}/v{VERSION}/"
        assert target.startswith(below), target
        assert (ROOT / target.removeprefix(below).partition("#")[0]).is_file(), target
    assert ANY_LINK.sub("", shown) == ANY_LINK.sub("", README)


def test_without_an_address_links_become_their_text_and_pictures_their_words() -> None:
    shown = PAGE["package_page"](README, VERSION, "")
    assert all(target.startswith(("#", "https://doi.org/")) for _, target in ANY_LINK.findall(shown))
    picture = "![One step: before](benchmarks/results/plots/timeline.png)"
    assert PAGE["package_page"](picture, VERSION, "") == "*One step: before*"
    assert len(shown.splitlines()) == len(README.splitlines())


def test_code_and_links_to_elsewhere_stay_as_they_are() -> None:
    text = "[a](b.md#c) [d](https://e.example) [f](#g)\n```\n[h](i.md)\n```\n![j](k.png)\n"
    expected = f"[a]({ADDRESS}/blob/v1.0.0/b.md#c) [d](https://e.example) [f](#g)\n```\n[h](i.md)\n```\n"
    assert PAGE["package_page"](text, "1.0.0", ADDRESS) == f"{expected}![j]({ADDRESS}/raw/v1.0.0/k.png)\n"
