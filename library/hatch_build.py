"""Makes the README that a package index shows from README.md. hatchling calls it at each build."""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)\s]+)\)")
"""A link to a file of the repository, which an index does not have."""


class ReadmeHook(MetadataHookInterface):
    """Sets the README and the addresses of the project.

    The environment variable ``DOCS_REPOSITORY`` has the address of the repository; the workflow
    ``release`` sets it. Without it, links to files become text, and the package has no addresses.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Set what pyproject.toml calls dynamic."""
        readme = Path(self.root, "README.md").read_text("utf-8")
        address = os.environ.get("DOCS_REPOSITORY", "").rstrip("/")
        urls: dict[str, str] = {}
        if address:
            files = f"{address}/blob/v{metadata['version']}"
            urls["Repository"] = address
            urls["Documentation"] = f"{address}/tree/v{metadata['version']}/docs"
            urls["Changelog"] = f"{files}/library/CHANGELOG.md"
        else:
            files = ""
        text = LINK.sub(lambda link: absolute_link(link[1], link[2], files), readme)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls


def absolute_link(text: str, path: str, files: str) -> str:
    """A link of README.md, whose paths begin in library/, without a path that leads nowhere."""
    path = os.path.normpath(f"library/{path}")
    if not files:
        return f"{text} (`{path}` of the repository)"
    return f"[{text}]({files}/{path})"
