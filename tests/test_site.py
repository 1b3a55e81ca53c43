"""The documentation site: built strictly, complete, and without a request to another server."""

import importlib.util
import os
import posixpath
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.nightly

pytest.importorskip("mkdocs", reason="make test installs it")
PUBLIC = (
    "Trainer",
    "BatchLoader",
    "EpochMean",
    "ConfigError",
    "RunError",
    "Checkpoints",
    "LossGuard",
)


REPOSITORY = "https://host/us"


class Found(HTMLParser):
    """Where a page leads, what it shows, and which places it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.pictures: list[str] = []
        self.ids = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids.add(values.get("id", ""))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "img":
            self.pictures.append(values["src"])


def build(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    # Not --quiet, with which --strict has no effect.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DOCS_REPOSITORY": REPOSITORY}
    return subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True)


def test_the_site_is_complete(tmp_path: Path):
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("index.html")}
    for source in (ROOT / "docs").rglob("*.md"):
        name = source.relative_to(ROOT / "docs").with_suffix("").as_posix().removesuffix("README")
        assert f"{name.rstrip('/')}/index.html" in pages, name
    texts = {name: path.read_text() for name, path in pages.items()}
    for name in PUBLIC:
        assert re.search(rf'id="samestep[\w.]*\.{name}"', texts["reference/index.html"]), name
    contents = (tmp_path / "llms.txt").read_text()
    assert contents.startswith("# Samestep\n\n> The same steps")
    links = [
        posixpath.normpath(link) for link in re.findall(r"^- \[\w[^]]*\]\((.*)\)$", contents, re.M)
    ]
    assert {f"{link}/index.html".removeprefix("./") for link in links} == pages.keys()
    home = texts["index.html"]
    for link in (
        'href="start/"',
        'href="https://host/us/blob/main/LICENSE"',
        'src="img/report.png"',
    ):
        assert link in home
    found = {path: Found(path.read_text()) for path in pages.values()}
    for path, page in found.items():
        for link in [*page.links, *page.pictures]:
            check_link(path, link, found)
        # No picture of another server.
        assert not [picture for picture in page.pictures if "//" in picture]
    loaded = [
        line
        for text in texts.values()
        for line in re.findall(r"<(?:script|link)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*", text)
        if "canonical" not in line
    ]
    assert loaded == []


def check_link(page: Path, link: str, found: dict[Path, Found]) -> None:
    """Whether a link leads to a file or a place of the site, or to a file of the repository."""
    target, _, anchor = link.partition("#")
    if target.startswith(f"{REPOSITORY}/blob/main/"):
        assert (ROOT / target.removeprefix(f"{REPOSITORY}/blob/main/")).exists(), (page, link)
    if re.match(r"\w+:", target):
        return
    path = (page.parent / target).resolve() if target else page
    path = path / "index.html" if path.is_dir() else path
    assert path.is_file(), (page, link)
    if path in found:
        assert anchor in found[path].ids, (page, link)


def test_without_an_address_files_of_the_repository_are_no_links():
    spec = importlib.util.spec_from_file_location("pages", ROOT / ".github/pages.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    text = (ROOT / "README.md").read_text()
    shown = hook.on_page_markdown(text, page, SimpleNamespace(repo_url=""), None)
    assert "![License: MIT](img/license.svg)\n" in shown
    assert "[Start](start.md)" in shown
    links = re.findall(r"\]\(([^)]+)\)", shown)
    assert [link for link in links if "nowhere" in link or "actions" in link] == []
