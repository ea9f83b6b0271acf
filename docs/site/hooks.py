"""Build the site from pages that GitHub shows too: the README as its start, files outside docs/ as pages, and the reference.

A link in a page is relative to its file, as on GitHub. The site has a place for each file that a page links to: a Markdown file
and a program become pages, any other file is copied. So the site needs no address of the repository.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import reference

ROOT = Path(__file__).resolve().parents[2]
HOMES = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "ring_attn_core/kernels/hopper/README.md": "hopper.md",
}
"""The place in the site of each Markdown file that is not simply the one of docs/."""

LINK = re.compile(r"(\]\()([^)\s:#]+)(#[^)\s]*)?\)")
CODE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)


def home(path: str) -> str:
    """Return the place in the site of a file of the repository."""
    if path in HOMES:
        return HOMES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}" + ".md" * path.endswith(".py")


def origin(page: str) -> str:
    """Return the file of the repository that is at this place in the site, or would be there."""
    return next((path for path, place in HOMES.items() if place == page), f"docs/{page}")


def linked(path: str, text: str) -> Iterable[str]:
    """Yield the files of the repository that a page links to."""
    for _, link, _ in LINK.findall(CODE.sub("", text)):
        if (ROOT / (target := posixpath.normpath(posixpath.join(posixpath.dirname(path), link)))).is_file():
            yield target


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.remove(next(file for file in files if file.src_uri == "README.md"))
    pages = [*HOMES, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    targets = {target for page in pages for target in linked(page, (ROOT / page).read_text())}
    for path in sorted({*HOMES, *(path for path in targets if not path.startswith("docs/"))}):
        if path.endswith(".py"):
            text = f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n````python\n{(ROOT / path).read_text()}````\n"
            files.append(File.generated(config, home(path), content=text))
        else:
            files.append(File.generated(config, home(path), abs_src_path=str(ROOT / path)))
    for name, text in reference.pages(ROOT).items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here, place = posixpath.dirname(origin(page.file.src_uri)), posixpath.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, link[2]))
        if not (ROOT / target).is_file():
            return link[0]
        return f"{link[1]}{posixpath.relpath(home(target), place or '.')}{link[3] or ''})"

    markdown = LINK.sub(moved, markdown)
    return markdown if place.startswith(("source", "reference")) else reference.with_links(markdown, reference.names(ROOT))
