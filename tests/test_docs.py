# SPDX-License-Identifier: Apache-2.0
"""The pages in docs/ hang together: without mkdocs, what ``make docs`` would refuse is found here."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import ds_fsmoe
from tests import pages

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [*(ROOT / each for each in pages.PAGES), ROOT / "CONTRIBUTING.md"]
LINK = re.compile(r"\]\((?![a-z]+:)([^)\s#]*)(?:#([^)\s]*))?\)")
CHECK = runpy.run_path(str(ROOT / "tools" / "check_docs.py"), run_name="check_docs")


FENCED = re.compile(r"^( *)```.*?^\1```$", flags=re.DOTALL | re.MULTILINE)


def text_of(page: Path) -> str:
    """Without blocks of code and code in a line, in which nothing is a link or a heading."""
    return re.sub(r"`[^`\n]*`", "", FENCED.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """The headings' anchors, as mkdocs and forges make them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", each).strip().lower()) for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(text_of(page)):
        file = (page.parent / target).resolve() if target else page
        assert file.is_file(), target
        assert ROOT in file.parents, f"{target} is outside the repository"
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


NOT_IN_NAVIGATION = ("glossary.md",)
"""Pages of docs/ that others link to; so are the changelog, CONTRIBUTING and the notes on benchmarks."""


def test_every_page_is_in_the_navigation_once_or_linked_to() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("\n\n")[0]
    groups = re.findall(r"^  - (.+):(?: index.md)?$", nav, flags=re.MULTILINE)
    assert groups == ["Home", "Start", "How-to", "Explanation", "Reference"]
    listed = re.findall(r"(\S+\.md)$", nav, flags=re.MULTILINE)
    # README.md is the front page, and files beside docs/ are put under repository/: see tools/docs_site.py.
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert set(NOT_IN_NAVIGATION) <= set(pages)
    assert sorted(listed) == sorted({"index.md", *pages} - set(NOT_IN_NAVIGATION))
    for name in NOT_IN_NAVIGATION:
        assert any(name in target for page in PAGES for target, _ in LINK.findall(text_of(page))), name


def test_every_public_name_is_documented_once_in_the_reference_and_no_other() -> None:
    assert CHECK["problems"]() == []
    api = (DOCS / "api.md").read_text().replace("::: ds_fsmoe.install\n", "::: ds_fsmoe.instal\n\n::: ds_fsmoe.MoE\n")
    assert CHECK["problems"](api) == [
        "docs/api.md: ds_fsmoe.install is public and missing",
        "docs/api.md: ds_fsmoe.instal is not public",
        "docs/api.md: ds_fsmoe.MoE is there twice",
    ]


def test_references_to_public_names_are_to_public_names_whose_parameters_stand_one_a_line() -> None:
    names = CHECK["public_names"]()
    for page in PAGES:
        for name in re.findall(r"\]\[ds_fsmoe\.(\w+)\]", page.read_text()):
            assert name in names, f"{page.name}: ds_fsmoe.{name}"
    # ``a, b: ...`` reads well and is one parameter of that name to whatever builds the reference.
    together = re.compile(r"(?m)^ {4,}[a-z_]+(, [a-z_]+)+: ")
    assert [name for name in names if together.search(getattr(ds_fsmoe, name).__doc__ or "")] == []


def test_the_letters_that_names_of_tensors_end_in_are_defined() -> None:
    table = (DOCS / "glossary.md").read_text().split("## Letters")[1].split("## Words")[0]
    defined = re.findall(r"^\| (\w) \|", table, flags=re.MULTILINE)
    assert len(defined) == len(set(defined))
    assert set("BLSMHEeKCcNP") <= set(defined)
