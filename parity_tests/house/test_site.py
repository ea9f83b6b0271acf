"""The site of docs/ and of the docstrings: it builds strictly, shows every public name, and a browser reads every page."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from ..support import chromium
from ..support.programs import ROOT

PACKAGES = (
    "ring_attn_core",
    "ring_attn_jax",
    "ring_attn_torch",
    "ring_attn_jax.functional",
    "ring_attn_torch.functional",
    "ring_attn_torch.transformers",
)
READABLE = 4.5
"""The least contrast of text that WCAG 2.2 allows at level AA (success criterion 1.4.3)."""


class Page(HTMLParser):
    """The ids and the links of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.update(filter(None, (given.get("id"), given.get("name") if tag == "a" else None)))
        self.links += [value for key in ("href", "src") if (value := given.get(key))]


def build(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout, as `make docs` does."""
    for package in ("mkdocs", "material", "mkdocstrings_handlers"):
        pytest.importorskip(package, reason=f"the site needs {package}: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    variables = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    return {str(file.relative_to(site)): Page(file) for file in sorted(site.rglob("*.html"))}


def public(package: str) -> list[str]:
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text())
    return next(
        ast.literal_eval(x.value) for x in tree.body if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "__all__"
    )


def inventory(site: Path) -> dict[str, str]:
    """Return the place of each name in objects.inv."""
    lines = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    entries = (line.split() for line in lines)
    return {name: place.replace("$", name) for name, _, _, place, *_ in entries}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_an_entry(site: Path, pages: dict[str, Page], package: str):
    places = inventory(site)
    missing = [name for name in public(package) if f"{package}.{name}" not in places]
    assert missing == []
    for name in public(package):
        page, _, anchor = places[f"{package}.{name}"].partition("#")
        assert anchor in pages[page].ids, name


def test_every_link_and_anchor_leads_somewhere(site: Path, pages: dict[str, Page]):
    broken = []
    for name, page in pages.items():
        for link in page.links if name != "404.html" else []:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (site / name).parent.joinpath(unquote(parts.path)).resolve() if parts.path else site / name
            known = pages.get(str(target.relative_to(site)))
            if not target.exists() or (known and parts.fragment and unquote(parts.fragment) not in known.ids):
                broken.append(f"{name}: {link}")
    assert broken == []


def test_no_page_asks_another_host_or_names_a_path_of_this_machine(site: Path, pages: dict[str, Page]):
    scripts = {link for page in pages.values() for link in page.links if re.search(r"//.*\.(js|css|woff2?)$", link)}
    assert not scripts
    assert not [name for name in pages if str(ROOT) in (site / name).read_text(encoding="utf-8")]


def test_no_docstring_is_left_as_it_was_written(site: Path, pages: dict[str, Page]):
    left = re.compile(r"``|:(?:class|func|meth|mod):")
    assert not [
        name for name in pages if name.startswith("reference/") and left.search((site / name).read_text(encoding="utf-8"))
    ]


def test_a_broken_link_and_a_name_without_a_docstring_fail(tmp_path: Path):
    ignored = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "parity_tests")
    root = shutil.copytree(ROOT, tmp_path / "root", ignore=ignored)
    shutil.copytree(ROOT / "parity_tests" / "support", root / "parity_tests" / "support")
    page, masks = root / "docs" / "numerics.md", root / "ring_attn_core" / "masks.py"
    page.write_text(page.read_text() + "\n[gone](gone.md) and [away](features.md#away)\n")
    masks.write_text(masks.read_text().replace('"""Return the mask in which every query sees every key."""', ""))
    done = build(root, tmp_path / "site")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "gone.md" in said
    assert "#away" in said
    assert "ring_attn_core.full has no docstring" in said


@pytest.fixture(scope="module")
def browser(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    program = chromium.find()
    if not program:
        pytest.skip(f"needs a Chromium: none of {', '.join(chromium.NAMES)} is here")
    with chromium.Browser(program, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


THEME = "document.body.setAttribute('data-md-color-scheme', '{}')"
WIDTH = "document.documentElement.scrollWidth"
CONTRAST = """(() => {
    const rgb = text => (text.match(/[\\d.]+/g) || []).map(Number)
    const light = c => { const [r, g, b] = c.map(x => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
                         return 0.2126 * r + 0.7152 * g + 0.0722 * b }
    const over = (a, b) => { const t = a[3] ?? 1; return [0, 1, 2].map(i => a[i] * t + b[i] * (1 - t)) }
    const known = new Map([[null, [255, 255, 255]]])
    const behind = e => {
        if (!known.has(e)) known.set(e, over(rgb(getComputedStyle(e).backgroundColor), behind(e.parentElement)))
        return known.get(e)
    }
    const still = document.head.appendChild(document.createElement("style"))
    still.textContent = "* { transition: none !important }"
    const worst = [99, ""]
    for (const e of document.querySelectorAll(".md-content :is(p, li, td, th, h1, h2, h3, h4, a:not(.headerlink), code)")) {
        if (!e.textContent.trim() || !e.offsetParent) continue
        const b = behind(e), [x, y] = [light(over(rgb(getComputedStyle(e).color), b)), light(b)].sort((p, q) => q - p)
        if ((x + 0.05) / (y + 0.05) < worst[0]) worst.splice(0, 2, (x + 0.05) / (y + 0.05), e.outerHTML.slice(0, 80))
    }
    return worst
})()"""


@pytest.mark.slow
def test_every_page_is_readable_on_a_phone_and_a_desktop_in_both_themes(pages, browser, address):
    wrong = []
    for name in pages:
        browser.size(1400)
        browser.open(address + name)
        for width in (1400, 400):
            browser.size(width)
            if browser.evaluate(WIDTH) > width:
                wrong.append(f"{name} is {browser.evaluate(WIDTH)} pixels wide in a window of {width}")
        for theme in ("default", "slate"):
            browser.evaluate(THEME.format(theme))
            contrast, where = browser.evaluate(CONTRAST)
            if contrast < READABLE:
                wrong.append(f"{name} has a contrast of {contrast:.1f} in {theme}: {where}")
    assert not wrong, "\n".join(wrong)
    assert browser.errors == []


SEARCH = """(async () => {
    const field = document.querySelector(".md-search__input")
    field.focus()
    for (let i = 0; i < 100; i++) {
        field.value = "ring_attention"
        field.dispatchEvent(new Event("keyup", { bubbles: true }))
        const found = [...document.querySelectorAll(".md-search-result__link")].map(a => a.pathname)
        if (found.length) return found
        await new Promise(next => setTimeout(next, 100))
    }
    return []
})()"""


@pytest.mark.slow
def test_search_finds_the_entry_of_ring_attention(browser, address):
    browser.open(address + "index.html")
    assert "/reference/attention.html" in browser.evaluate(SEARCH)
    assert browser.errors == []
