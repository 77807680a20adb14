# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: pages link to files of the repository as they do on a forge, and the site has those files.

README.md becomes the front page. A file outside docs/ that a page links to is put under repository/; a Markdown file
there becomes a page, and so does a notebook. Links are rewritten accordingly. Before all else the public names are
checked.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")

sys.path.insert(0, str(ROOT / "tools"))
from check_docs import problems  # noqa: E402


def place_on_site(path: str) -> str:
    """Where the site has a file of the repository."""
    if path == "README.md":
        return "index.md"
    if path.endswith(".ipynb"):
        path = f"{path.removesuffix('.ipynb')}.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def path_of(page: str) -> str:
    """The file of the repository that a page of the site is made from."""
    if page == "index.md":
        return "README.md"
    return page.removeprefix("repository/") if page.startswith("repository/") else f"docs/{page}"


def linked(path: str) -> set[str]:
    """The files that a Markdown file links to."""
    folder = posixpath.dirname(path)
    targets = (posixpath.normpath(posixpath.join(folder, each)) for each in LINK.findall((ROOT / path).read_text()))
    return {each for each in targets if not each.startswith("..") and (ROOT / each).is_file()}


def notebook_page(path: str) -> str:
    """A notebook as Markdown: its text, its code, and what it is kept with."""
    parts = []
    for cell in json.loads((ROOT / path).read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [
            f"```text\n{''.join(each['text']).rstrip()}\n```" for each in cell.get("outputs", []) if "text" in each
        ]
    return "\n\n".join(parts) + "\n"


def on_config(config: Any) -> None:
    """Every public name has a docstring and a place in the reference, or nothing is built."""
    if found := problems():
        raise PluginError("\n".join(found))


def on_files(files: Files, config: Any) -> Files:
    """Bring in the front page and, from page to page, whatever they link to."""
    waiting = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", *(path_of(page.src_uri) for page in files)]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if files.get_file_from_path(place_on_site(path)) is None:
            is_notebook = path.endswith(".ipynb")
            made = {"content": notebook_page(path)} if is_notebook else {"abs_src_path": str(ROOT / path)}
            files.append(File.generated(config, place_on_site(path), **made))
        if path.endswith((".md", ".ipynb")):
            waiting += linked(path)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links to files of the repository. Those that lead nowhere stay, and mkdocs reports them."""
    path = path_of(page.file.src_uri)
    # Whoever searches for a word wants a page that explains it, and not each day on which it was measured.
    if path == "benchmarks/LOG.md":
        page.meta["search"] = {"exclude": True}
    # The front page is two screens: it needs no list of its headings, and its tables need the room.
    if path == "README.md":
        page.meta["hide"] = ["toc", "footer"]
    here = posixpath.dirname(page.file.src_uri)
    if path == "docs/api.md":
        markdown = folded(markdown)

    def rewritten(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        if not (ROOT / target).is_file():
            return match[1]
        return posixpath.relpath(place_on_site(target), here or ".")

    return LINK.sub(rewritten, markdown)


def folded(reference: str) -> str:
    """Each public name as a line that opens: the reference has 80 screens, of which a reader wants one."""

    def fold(match: re.Match[str]) -> str:
        within = "".join(f"    {line}" for line in match[0].splitlines(keepends=True))
        return f'??? abstract "{match[1]}"\n\n{within}'

    return re.sub(r"^::: (\S+)\n(?:[ ]+\S.*\n)*", fold, reference, flags=re.MULTILINE)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings mark names as Sphinx has it; the mark is not shown."""
    return re.sub(r":(?:func|meth|class|attr|mod|data):(?=<code>)", "", html)
