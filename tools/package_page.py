# SPDX-License-Identifier: Apache-2.0
"""The README as a package index shows it: there, links to files of the repository would lead nowhere.

Whoever publishes the repository writes its address into ``REPOSITORY``. ``setup.py`` then makes every such link
absolute, to the tag of this version, so that an old release keeps showing its own pages. Without an address links
become text.
"""

from __future__ import annotations

import re

REPOSITORY = ""
"""For example https://github.com/OWNER/ds_fsmoe, without a slash at its end."""

_LINK = re.compile(r"(!?)\[((?:!\[[^\]]*\]\([^)]*\)|[^\[\]])*)\]\((?![a-z]+:|#)([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def package_page(readme: str, version: str, repository: str = REPOSITORY) -> str:
    """Return a README whose links to files are absolute.

    Args:
        readme: Markdown whose links are relative to the root of the repository.
        version: of the package; the repository has the tag ``v`` and that.
        repository: its address. If empty, a link becomes its text, and a picture what is written in its place.
    """

    def absolute(match: re.Match[str]) -> str:
        is_picture, text, target = match.groups()
        if not repository:
            return f"*{text}*" if is_picture else text
        kind = "raw" if is_picture else "blob"
        return f"{is_picture}[{text}]({repository}/{kind}/v{version}/{target})"

    parts, end = [], 0
    for code in _CODE.finditer(readme):
        parts += [_LINK.sub(absolute, readme[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, _LINK.sub(absolute, readme[end:])])


def addresses(repository: str = REPOSITORY) -> dict[str, str]:
    """Return what the metadata says of where the project is."""
    if not repository:
        return {}
    return {
        "Repository": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    }
