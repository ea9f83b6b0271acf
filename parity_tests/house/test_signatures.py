"""The public names of both packages, with their parameters and defaults, are those of ``signatures.txt``.

``python -m parity_tests.house.test_signatures`` writes that file anew, after a public name was changed on purpose.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ring_attn_jax as jax_package
import ring_attn_torch as torch_package

RECORD = Path(__file__).with_name("signatures.txt")


def signatures() -> str:
    """Return a line for each public function and class, and for each method that a public class has from these packages."""
    lines = [
        line
        for package in (jax_package, torch_package)
        for name in sorted(package.__all__)
        for line in of_name(f"{package.__name__}.{name}", getattr(package, name))
    ]
    return "\n".join(lines) + "\n"


def of_name(name: str, value: Any) -> Iterator[str]:
    """Yield the lines of one public name."""
    made_by_flax = inspect.isclass(value) and type(value) is not type  # its metaclass takes arguments of any kind
    yield name + of_callable(value.__init__ if made_by_flax else value)
    for method, function in inspect.getmembers_static(value) if inspect.isclass(value) else ():
        function = getattr(function, "__func__", function)
        public = not method.startswith("_") or method in ("__call__", "__iter__")
        if inspect.isfunction(function) and public and function.__module__.startswith("ring_attn"):
            yield f"{name}.{method}{of_callable(function)}"


def of_callable(value: Any) -> str:
    """Return the parameters of a callable in brackets: names, kinds and defaults, without annotations."""
    taken = inspect.signature(value).replace(return_annotation=inspect.Signature.empty)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in taken.parameters.values()]
    return re.sub(r" at 0x\w+", "", str(taken.replace(parameters=bare)))


def test_every_public_signature_is_the_recorded_one():
    recorded, found = (text.splitlines() for text in (RECORD.read_text(), signatures()))
    assert [line for line in recorded if line not in found] == [], "gone or changed"
    assert [line for line in found if line not in recorded] == [], "new: python -m parity_tests.house.test_signatures records it"


if __name__ == "__main__":
    RECORD.write_text(signatures())
