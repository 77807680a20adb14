# SPDX-License-Identifier: Apache-2.0
"""Search on the site of the docs works from disk, where browsers start no workers: in a real browser."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.test_report_browser import browser, until  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
SHIM = ROOT / "docs" / "assets" / "iframe-worker.js"
PAGE = """<body><script src="iframe-worker.js"></script><script>
const worker = new Worker("double.js");
worker.addEventListener("message", (event) => { document.title = "answer " + event.data; });
worker.postMessage(21);
</script></body>"""


@pytest.mark.long
def test_a_worker_answers_on_a_page_that_is_opened_from_disk(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    shutil.copy(SHIM, tmp_path)
    (tmp_path / "double.js").write_text('addEventListener("message", (event) => postMessage(2 * event.data));')
    page = tmp_path / "page.html"
    page.write_text(PAGE)
    browser.get(page.as_uri())
    assert until(browser, lambda driver: driver.title) == "answer 42"


def test_the_site_is_built_with_it_and_fetches_no_other() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    assert f"polyfills: [assets/{SHIM.name}]" in settings
    assert "\n  - offline" in settings
