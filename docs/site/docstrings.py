"""Turn the docstrings of the packages into Markdown: ``code``, roles, formulas, and lists of arguments."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[2]
CORE = "ring_attn_core"
DEFAULT = re.compile(r"\bdefault=([\w.]+)")
TAKES = re.compile(r"\btakes\((\w+)\)")
CODE = re.compile(r"``(.+?)``", re.DOTALL)
ROLE = re.compile(r":(?:class|func|meth|mod):`~?([\w.]+)`")
ARGUMENT = re.compile(r" {4}(?=\S)([\w*`]+(?:, [\w*`]+)*): ")
RUN_IN = re.compile(r"(?:^|(?<=[.;] )|(?<=[.;]\n))(?=``\w+``(?:,\s``\w+``)*:\s)")
VERB = re.compile(r"^(Returns?|Raises?)\b")
REST = re.compile(r"(?<=\. )(?=The other arguments|All other arguments|Other arguments|Raise )")


class Docstrings(griffe.Extension):
    """Rewrite each docstring before it is rendered, and show the fields of a record that a constructor takes."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        if pkg.name != CORE and CORE not in loader.modules_collection:
            loader.load(CORE)  # where records begin
        names = _public(pkg.name)
        todo: list[Any] = [pkg]
        while todo:
            item = todo.pop()
            if item.docstring:
                item.docstring.value = markdown(item.docstring.value, pkg.name, names)
            for taken in TAKES.findall(" ".join(str(each.value) for each in getattr(item, "decorators", ()))):
                item.parameters = griffe.Parameters(item.parameters[0], *_fields(item.parent.module[taken]))
            todo += [member for member in item.members.values() if not member.is_alias]


def _fields(record: griffe.Class) -> list[griffe.Parameter]:
    """Return the parameters of a dataclass, those by position first, as ``dataclasses`` derives them from its bases."""
    found: dict[str, griffe.Parameter] = {}
    for each in (*reversed(record.mro()), record):
        named = "kw_only=True" in " ".join(str(decorator.value) for decorator in each.decorators)
        for name, field in each.members.items():
            if not field.is_attribute or field.annotation is None or "property" in field.labels:
                continue
            if str(field.annotation) == "KW_ONLY":
                named = True
                continue
            text = str(field.value)
            by_name = named and "kw_only=False" not in text
            kind = griffe.ParameterKind.keyword_only if by_name else griffe.ParameterKind.positional_or_keyword
            stated = DEFAULT.search(text)
            default = (stated[1] if stated else None) if text.startswith("field(") else field.value
            found[name] = griffe.Parameter(name, annotation=field.annotation, kind=kind, default=default)
            if "init=False" in text:
                del found[name]
    return sorted(found.values(), key=lambda x: x.kind is griffe.ParameterKind.keyword_only)


def _public(package: str) -> list[str]:
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    lists = (node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
    return [name for names in lists for name in ast.literal_eval(names)]


def markdown(text: str, package: str = "", names: list[str] | tuple[str, ...] = ()) -> str:
    """Return a docstring as Markdown, with links from names of the package to their entries."""

    def inline(part: str) -> str:
        pieces = CODE.split(ROLE.sub(r"``\1``", part))
        return "".join(_code(piece, package, names) if i % 2 else _plain(piece) for i, piece in enumerate(pieces))

    return "\n\n".join(_block(block, inline) for block in re.split(r"\n\s*\n", text.rstrip()))


def _plain(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*") if text.count("*") % 2 else text.replace("<", "&lt;")


def _code(text: str, package: str, names: Any) -> str:
    text = " ".join(text.split())
    name = text.split(".")[-1]
    return f"[`{text}`][{package}.{name}]" if name in names and (text == name or text.startswith("ring_attn")) else f"`{text}`"


def _block(block: str, inline: Any) -> str:
    lines = block.split("\n")
    indented = [line.startswith("    ") for line in lines]
    if all(indented):
        return _listed(lines, inline) if "``" in block else block
    if True in indented and lines[indented.index(True) - 1].rstrip().endswith(":"):
        first = indented.index(True)
        head, body = "\n".join(lines[:first]), lines[first:]
        return f"{inline(head)}\n\n" + (_listed(body, inline) if ARGUMENT.match(body[0]) or "``" in block else "\n".join(body))
    if RUN_IN.search(block):
        lead, *items = RUN_IN.split(block)
        *_, last = items = [*items[:-1], *REST.split(items[-1], 1)]
        tail = "" if RUN_IN.match(last) else items.pop()
        listed = "\n".join("- " + inline(" ".join(item.split())) for item in items)
        return "\n\n".join(filter(None, (inline(lead), listed, inline(VERB.sub(r"**\1**", tail)))))
    return inline(VERB.sub(r"**\1**", block))


def _listed(lines: list[str], inline: Any) -> str:
    """Return indented lines ``name: text`` or ``- text`` as a list; continuation lines are indented deeper."""
    return "\n".join(_item(item, inline) for item in re.split(r"\n(?= {4}\S)", "\n".join(lines)))


def _item(item: str, inline: Any) -> str:
    named = ARGUMENT.match(item)
    rest = " ".join(item[named.end() if named else 0 :].split()).removeprefix("- ")
    return f"- `{named[1].replace('`', '')}`: {inline(rest)}" if named else f"- {inline(rest)}"
