"""Find prose that breaks the house's rules: docstrings and errors of the packages and of parity_tests, names of tests, pages,
and the changelog.

    python -P parity_tests/house/prose.py [path ...]    print the findings below these paths, or all of them

Findings older than the rules stand in ``prose_baseline.txt``, which may only shrink. Each finding is a line
``file: name: rule``. These rules find what a program can find; a sentence that has to be read twice needs a reader.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROOMS = "ring_attn_core", "ring_attn_jax", "ring_attn_torch", "ring_attn_cli", "parity_tests"
PAGES = "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "benchmarks/**/*.md"

NAMED = "ring_attn_*/**/*.*", "parity_tests/**/*.py", "benchmarks/**/*.*", "examples/**/*.py", "docs/**/*.*", "*.md"
"""The files that a docstring may name."""
INVENTED = {"file.py", "random.py", "torch.py"}
"""Examples of paths in docstrings."""

WORDS_OF_A_FIRST_SENTENCE = 25
CHARACTERS_OF_A_LINE = 140
WORDS_OF_A_BULLET = 30

OPENERS = re.compile(r"(What|Who|Whose|Whoever|Whatever|Where|Which|Of|How|Whether|Nobody|So many)\b")
"""Words that turn the order of subject, verb and object around when a sentence begins with them."""

BANNED = {
    "ValueError for, ValueError where": r"\bValueError(s)? (for|where)\b",
    "is no, are no, was no": r"(?<!there )\b(is|are|was|were) no (?!(longer|more|less|fewer|slower|faster|larger|smaller)\b)",
    "is none, are none": r"\b(is|are) none\b(?! of)",
    "nobody, whoever": r"\b(nobody|whoever)\b",
}


def findings(paths: list[Path] | None = None) -> list[str]:
    """Return the findings in all rooms and pages, or in those at and below ``paths``, sorted."""
    chosen = [*_code(), *_pages()]
    if paths:
        chosen = [file for file in chosen if any(file.is_relative_to(path.resolve()) for path in paths)]
    found = [(file, name, rule) for file in chosen for name, rule in (_of_code(file) if file.suffix == ".py" else _of_page(file))]
    return sorted(f"{file.relative_to(ROOT)}: {name}: {rule}" for file, name, rule in found)


def _code() -> Iterator[Path]:
    for room in ROOMS:
        yield from (ROOT / room).rglob("*.py")


def _pages() -> Iterator[Path]:
    for pattern in PAGES:
        yield from ROOT.glob(pattern)


def _of_code(file: Path) -> Iterator[tuple[str, str]]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    yield from ((name, rule) for name, text in _docstrings_of(file) for rule in judged(text))
    yield from ((f"error {' '.join(text.split()[:6])}", rule) for text in raised(tree) for rule in banned(text))
    tests = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    yield from ((name, f"the name, as a sentence, {rule}") for name in tests for rule in judged(name))


@cache
def _docstrings_of(file: Path) -> list[tuple[str, str]]:
    return list(docstrings(ast.parse(file.read_text(encoding="utf-8"))))


def docstrings(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each docstring of a module, class, function or field, without its indentation."""
    body: list[Any] = getattr(tree, "body", [])
    if isinstance(tree, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(tree)):
        yield prefix or "module", text
    for node, following in zip(body, [*body[1:], None], strict=False):
        if isinstance(node, ast.Assign | ast.AnnAssign) and (text := _text(following)):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            yield ".".join(filter(None, (prefix, ast.unparse(target)))), text
        elif isinstance(getattr(node, "body", None), list):
            yield from docstrings(node, ".".join(filter(None, (prefix, getattr(node, "name", "")))))


def _text(node: Any) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return None


def judged(text: str) -> Iterator[str]:
    """Yield the rules that a docstring breaks, or the name of a test that is read as a sentence."""
    text = text.removeprefix("test_").replace("_", " ").capitalize() if text.startswith("test_") else text
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z`])", " ".join(re.sub(r"(?m)^    .*$", "", text).split()))
    first, later = sentences[0], sentences[1:]
    if len(first.split()) > WORDS_OF_A_FIRST_SENTENCE:
        yield f"the first sentence has more than {WORDS_OF_A_FIRST_SENTENCE} words"
    if OPENERS.match(first):
        yield f"begins with {first.split()[0]}"
    if any(OPENERS.match(sentence) for sentence in later):
        yield "a sentence begins with What, Who, Where, Which, Of, How, Whether or the like"
    yield from banned(text)


def banned(text: str) -> Iterator[str]:
    """Yield the rules of words that a text breaks."""
    for phrase, pattern in BANNED.items():
        if re.search(pattern, text):
            yield f"has a banned phrase: {phrase}"


def raised(tree: ast.AST) -> Iterator[str]:
    """Yield the text of each error that a module raises, with ``...`` for the values in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for x in node.exc.args:
                parts = x.values if isinstance(x, ast.JoinedStr) else [x]
                yield "".join(str(p.value) if isinstance(p, ast.Constant) else "..." for p in parts)


def absent_files() -> list[str]:
    """Return ``file: name: path`` for each path of a Python file or page that a docstring names although no such file exists."""
    there = {f"/{file.relative_to(ROOT)}" for pattern in NAMED for file in ROOT.glob(pattern)}
    absent = lambda path: not any(file.endswith(f"/{path}") for file in there)
    texts = ((file, *named) for file in _code() for named in _docstrings_of(file))
    return [f"{file.relative_to(ROOT)}: {name}: {path}" for file, name, text in texts for path in paths_in(text) if absent(path)]


def paths_in(text: str) -> list[str]:
    """Return the paths of Python files and pages in a text, without invented ones."""
    return [path for path in re.findall(r"(?:\w+/)*\w+\.(?:py|md)\b", text) if path not in INVENTED]


def _of_page(file: Path) -> Iterator[tuple[str, str]]:
    in_code = False
    for line in file.read_text(encoding="utf-8").splitlines():
        in_code ^= line.startswith("```")
        if len(line) > CHARACTERS_OF_A_LINE and not in_code and not line.lstrip().startswith("|"):
            yield " ".join(line.split()[:5]), f"the line has more than {CHARACTERS_OF_A_LINE} characters"
    if file.name == "CHANGELOG.md":
        for bullet in re.findall(r"^- (.+(?:\n  .+)*)", file.read_text(encoding="utf-8"), re.MULTILINE):
            if len(bullet.split()) > WORDS_OF_A_BULLET:
                yield " ".join(bullet.split()[:5]), f"the bullet has more than {WORDS_OF_A_BULLET} words"


if __name__ == "__main__":
    for finding in findings([Path(argument) for argument in sys.argv[1:]]):
        print(finding)
