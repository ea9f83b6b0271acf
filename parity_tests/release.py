"""Release checks: ``python parity_tests/release.py v0.2.0`` writes the release notes of a tag, or says what does not fit.

The version stands in ``ring_attn_core/__init__.py`` alone, from which the wheel has it. A tag must be "v" and that version, and
CHANGELOG.md must have a section of it. The notes go to stdout.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def version_of(root: Path = ROOT) -> str:
    """Return the version that the wheel has. Raise ValueError if it is not a release."""
    text = (root / "ring_attn_core" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.M)
    if found is None or not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", found[1]):
        raise ValueError('ring_attn_core/__init__.py must have a line such as __version__ = "0.2.0"')
    return found[1]


def notes_of(tag: str, root: Path = ROOT) -> str:
    """Return the section of CHANGELOG.md for ``tag``. Raise ValueError if the version differs or the section is missing."""
    version = version_of(root)
    if tag != f"v{version}":
        raise ValueError(
            f"the tag is {tag} and the version {version}: set __version__ in ring_attn_core/__init__.py, or tag v{version}"
        )
    sections = re.split(r"^## \[(.+?)\].*\n", (root / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    texts = dict(zip(sections[1::2], sections[2::2], strict=True))
    if not texts.get(version, "").strip():
        raise ValueError(f"CHANGELOG.md has no section [{version}]: rename [Unreleased] and begin a new one")
    return texts[version].strip() + "\n"


if __name__ == "__main__":
    try:
        sys.stdout.write(notes_of(sys.argv[1] if len(sys.argv) > 1 else f"v{version_of()}"))
    except ValueError as error:
        sys.exit(f"release: {error}")
