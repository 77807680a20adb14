# SPDX-License-Identifier: Apache-2.0
"""What a package index shows of the README reads as the README does, and none of its links leads nowhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from ds_fsmoe.versions import VERSION

ROOT = Path(__file__).resolve().parents[1]
PAGE = runpy.run_path(str(ROOT / "tools" / "package_page.py"))
README = (ROOT / "README.md").read_text()
ADDRESS = "https://forge.example/owner/name"
ANY_LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")


def test_with_an_address_every_link_is_absolute_and_leads_to_a_file_of_this_version() -> None:
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


def test_the_metadata_has_addresses_only_where_there_is_one() -> None:
    assert PAGE["addresses"]("") == {}
    assert set(PAGE["addresses"](ADDRESS).values()) == {
        ADDRESS,
        f"{ADDRESS}/issues",
        f"{ADDRESS}/blob/main/CHANGELOG.md",
    }
