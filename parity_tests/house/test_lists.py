"""Pages and docstrings that list the layouts or the rotary scalings list all that the code has, and no others."""

from __future__ import annotations

import re

import pytest

from ring_attn_core.layouts import LAYOUTS
from ring_attn_core.model.rotary import SCALINGS

from .source import ROOT

OF_LAYOUTS = {
    "docs/features.md": r"\n\| layout \|(.*?)\n\n",
    "docs/training.md": r"\n- The layout is (.*?)\n- ",
    "docs/transformers.md": r' `layout` \((.*?) or "balanced"\)',
    "ring_attn_jax/call/signature.py": r"\n        layout: (.*?):",
    "ring_attn_torch/call/signature.py": r"\n        layout: (.*?):",
    "ring_attn_torch/torchtitan.py": r"``layout``: (.*?)\.",
}
"""For each place the text around its list of layouts, in which each name stands in double quotes."""
OF_SCALINGS = {
    "README.md": r"`Rotary` with (.*?) \|",
    "docs/training.md": r"\n\| `scaling` \|(.*?)\n",
    "ring_attn_core/model/rotary.py": r"\n\n(    Linear .*?)\n\nwith ",
    "ring_attn_jax/layers/rotary.py": r"\n    ``scaling``: (.*?) \(",
    "ring_attn_torch/layers/rotary.py": r"\n    ``scaling``: (.*?) \(",
}
"""The same for scalings: a name follows a backquote, or begins a line of the table in the core's docstring."""


def listed(place: str, around: str, name: str) -> set[str]:
    """Return the names that match ``name`` in the text of ``place`` that matches ``around``."""
    texts = re.findall(around, (ROOT / place).read_text(encoding="utf-8"), re.DOTALL)
    return set(re.findall(name, "\n".join(texts), re.MULTILINE))


@pytest.mark.parametrize("place", OF_LAYOUTS)
def test_a_list_of_layouts_names_every_layout(place: str):
    assert listed(place, OF_LAYOUTS[place], r'"(\w+)"') == set(LAYOUTS)


@pytest.mark.parametrize("place", OF_SCALINGS)
def test_a_list_of_scalings_names_every_scaling(place: str):
    assert listed(place, OF_SCALINGS[place], r"(?:`|^    )([A-Z]\w+)") == {scaling.__name__ for scaling in SCALINGS}
