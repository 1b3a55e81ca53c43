"""A hook of MkDocs: pages that lie outside docs/, and links between files of the repository.

On GitHub a link is relative to its file. On the site it leads to the page that the file became, or,
for other files, to the repository; a site without the address of the repository has only its text.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
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
BADGE = re.compile(r"^\[!\[CI\].*\n", re.M)
NOWHERE = "nowhere:"
UNLINKED = re.compile(rf"\[(!\[[^\]]*\]\([^)]*\)|[^\[\]]*)\]\({NOWHERE}[^)]*\)")
"""A link, around a picture or a text, to a file that the site does not have."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    """Write llms.txt, a table of contents for language models (llmstxt.org)."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    section = None
    for page in nav.pages:
        top = page.ancestors[-1].title if page.ancestors else config.site_name
        if top != section:
            section = top
            lines += ["", f"## {section}", ""]
        lines.append(f"- [{page.title or section}]({page.url})")
    files.append(File.generated(config, "llms.txt", content="\n".join([*lines, ""])))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let each link lead to a page of the site, or to a file of the repository."""
    here = page.file.src_uri
    source = next((old for old, new in OUTSIDE.items() if new == here), f"docs/{here}")

    def change(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[0]))
        new = OUTSIDE.get(target, target.removeprefix("docs/"))
        if target in OUTSIDE or target.startswith("docs/"):
            return posixpath.relpath(new, posixpath.dirname(here) or ".")
        if not (ROOT / target).exists():
            return link[0]  # MkDocs names it
        return f"{config.repo_url}/blob/main/{target}" if config.repo_url else NOWHERE

    # The badge is a picture of another server, about the newest commit and not about this site.
    markdown = LINK.sub(change, BADGE.sub("", markdown))
    return UNLINKED.sub(r"\1", markdown)
