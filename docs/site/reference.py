"""Write the pages of the reference: every public name of the packages, each package beside the other."""

from __future__ import annotations

import ast
import logging
import re
from functools import cache
from pathlib import Path

PACKAGES = {
    "ring_attn_core": "",
    "ring_attn_jax": "JAX",
    "ring_attn_torch": "PyTorch",
    "ring_attn_jax.functional": "JAX",
    "ring_attn_torch.functional": "PyTorch",
    "ring_attn_torch.transformers": "PyTorch",
    "ring_attn_torch.diffusers": "PyTorch",
    "ring_attn_torch.torchtitan": "PyTorch",
}
PAGES = {
    "attention": ("Attention", ("call", "attend", "block", "sharded")),
    "layouts_and_masks": ("Layouts, masks and plan", ("layouts", "masks", "runs", "plan")),
    "data": ("Data", ("data",)),
    "layers": ("Layers and models", ("layers", "model")),
    "variants": ("Variants", ("variants",)),
    "recurrence": ("Hybrid models", ("recurrence",)),
    "training": ("Training, weights and checkpoints", ("training", "ring")),
    "inference": ("Inference", ("inference", "cache")),
    "functional": ("Functions under known names", ()),
    "transformers": ("Hugging Face", ("attention", "masks", "parallel", "settings", "trainer")),
    "diffusers": ("diffusers", ()),
    "torchtitan": ("torchtitan", ()),
}
"""The title of a page, and the folders or modules of the packages whose public names it shows."""

NAME = re.compile(r"(?<![`\[\w])`(\w*[A-Z_]\w*)`(?![`\]])")
KEPT = re.compile(r"(^```.*?^```|\[[^\]]*\]\([^)]*\)|^#.*?$)", re.DOTALL | re.MULTILINE)
"""Code, links and headings: no link is put into these."""

ANY = "any"
"""The prefix of an anchor that leads to a name in whichever package."""

LOG = logging.getLogger("mkdocs.hooks.reference")


def public(root: Path, package: str) -> dict[str, str]:
    """Return the module of each name in the package's ``__all__``, by its absolute name, in the order of the imports."""
    folder = root / package.replace(".", "/")
    tree = ast.parse((folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")).read_text())
    modules: dict[str, str] = {}
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = f"{package}.{node.module}" if node.level else str(node.module)
            modules.update({alias.asname or alias.name: module for alias in node.names})
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
        elif not folder.is_dir() and isinstance(node, ast.ClassDef | ast.FunctionDef):
            modules[node.name] = package
        elif not folder.is_dir() and isinstance(node, ast.Assign):
            modules[ast.unparse(node.targets[0])] = package
    shared = public(root, "ring_attn_core") if package != "ring_attn_core" else {}
    return {name: shared.get(name, module) for name, module in modules.items() if name in names}


def page_of(module: str, package: str) -> str:
    """Return the page that shows the names of a module."""
    if package.count("."):
        return package.split(".")[1]
    room = module.split(".")[1]
    found = [page for page, (_, rooms) in PAGES.items() if room in rooms]
    if not found:
        raise ValueError(f"no page of the reference shows {module}: give {room!r} a page in PAGES of docs/site/reference.py")
    return found[0]


def pages(root: Path) -> dict[str, str]:
    """Return the Markdown of each page, by its name. Warn about each public name without a docstring."""
    found: dict[str, dict[str, dict[str, str]]] = {page: {} for page in PAGES}
    for package in PACKAGES:
        for name, module in public(root, package).items():
            found[page_of(module, package)].setdefault(name, {})[package] = module
            if not documented(root / module.replace(".", "/"), name):
                LOG.warning("%s.%s has no docstring in %s", package, name, module)
    return {page: _page(PAGES[page][0], names) for page, names in found.items()}


@cache
def names(root: Path) -> set[str]:
    """Return the public names of all packages."""
    return {name for package in PACKAGES for name in public(root, package)}


def documented(module: Path, name: str) -> bool:
    """Return whether a class, a function or a constant of the module has a docstring."""
    file = module.with_suffix(".py")
    body = ast.parse((file if file.exists() else module / "__init__.py").read_text()).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return bool(ast.get_docstring(node))
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
        if target and ast.unparse(target) == name:
            return isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
    return False


def _page(title: str, names: dict[str, dict[str, str]]) -> str:
    shared = any(module.startswith("ring_attn_core") for modules in names.values() for module in modules.values())
    intro = ["An entry that names no package is one object in both packages."] if shared else []
    return "\n\n".join([f"# {title}", *intro, *(_entry(name, modules) for name, modules in names.items())])


def _entry(name: str, modules: dict[str, str]) -> str:
    """Return the entry of a name: one if its packages share it, else one for each package."""
    if len(modules) == 1 or next(iter(modules.values())).startswith("ring_attn_core"):
        package, module = next(iter(modules.items()))
        anchors = "".join(f"[](){{ #{path}.{name} }}\n" for path in (ANY, *modules) if len(modules) > 1 or path == ANY)
        path = f"{package}.{name}" if len(modules) == 1 else f"{module}.{name}"
        return f"{anchors}\n{_block(path, name, full=len(modules) == 1)}"
    blocks = "\n".join(_block(f"{package}.{name}", PACKAGES[package], level=3, full=True) for package in modules)
    return f"## {name} {{ #{ANY}.{name} }}\n\n{blocks}"


def _block(path: str, label: str, level: int = 2, full: bool = False) -> str:
    options = {"heading_level": level, "toc_label": label, "show_root_full_path": str(full).lower()}
    return f"::: {path}\n    options:\n" + "".join(f"      {option}: {value}\n" for option, value in options.items())


def with_links(markdown: str, names: set[str]) -> str:
    """Return a page with a link from each of these names, if it is code of its own in a sentence or a table, to its entry."""
    parts = KEPT.split(markdown)
    linked = lambda code: f"[{code[0]}][{ANY}.{code[1]}]" if code[1] in names else code[0]
    return "".join(part if i % 2 else NAME.sub(linked, part) for i, part in enumerate(parts))
