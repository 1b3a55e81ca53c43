"""A hook of MkDocs: pages that lie outside docs/, and links between files of the repository.

On GitHub a link is relative to its file. On the site it leads to the page that the file became, or,
for other files, to the repository.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = {  # file of the repository: page of the site
    "README.md": "index.md",
    "library/README.md": "library.md",
    "CHANGELOG.md": "changelog.md",
    "library/CHANGELOG.md": "library-changelog.md",
    "examples/finetune/README.md": "finetune.md",
    "examples/language/README.md": "language.md",
    "examples/tables/README.md": "tables.md",
}
LINK = re.compile(r'(?<=\]\()(?!\w+:|#)([^)#\s]+)|(?<=<img src=")([^"]+)')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let each link lead to a page of the site, or to a file of the repository."""
    here = page.file.src_uri
    source = next((old for old, new in OUTSIDE.items() if new == here), f"docs/{here}")

    repository = config.repo_url or "https://repository.invalid"  # in a build on this machine

    def change(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[0]))
        new = OUTSIDE.get(target, target.removeprefix("docs/"))
        if target in OUTSIDE or target.startswith("docs/"):
            return posixpath.relpath(new, posixpath.dirname(here) or ".")
        if target.startswith("../"):  # the badge of CI
            return f"{repository}/{target.lstrip('./')}"
        if not (ROOT / target).exists():
            return link[0]  # MkDocs names it
        return f"{repository}/blob/main/{target}"

    return LINK.sub(change, markdown)
