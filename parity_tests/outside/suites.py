"""The suites of other projects that can run here, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Suite:
    """One suite. ``module``: the file here that shows its tests to pytest. ``file``: of a checkout; "" if ``package`` holds the
    tests. ``select``: pytest's -k. ``what``: what is tested in the place of what. ``known``: by a part of a test's name, the
    suite's own assumption that it fails by."""

    module: str
    package: str
    what: str
    file: str = ""
    select: str = ""
    known: dict[str, str] = field(default_factory=dict)

    def obstacle(self, source: Path | None) -> str | None:
        """Return why the suite cannot run, or None."""
        if find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.file and source is None:
            return f"it stands in a checkout: pass --source NAME=FOLDER, which holds {self.file}"
        if self.file and source and not (source / self.file).is_file():
            return f"{source} holds no {self.file}"
        return None

    def explain(self, case: str, reason: str) -> str:
        """Return the suite's own assumption that a case fails by, if it is known, else the reason in one line of Markdown."""
        return next((words for part, words in self.known.items() if part in case), reason.replace("|", "\\|"))

    @property
    def release(self) -> str:
        return f"{self.package} {metadata.version(self.package)}"


SUITES = {
    "tokamax": Suite(
        "tokamax_suite",
        "tokamax",
        "`functional.dot_product_attention`, with `softcap` `ring_attention`, as `attention_fn` of `AttentionTestBase`",
    ),
    "jax": Suite(
        "jax_suite",
        "jax",
        '`functional.dot_product_attention` as `jax.nn.dot_product_attention(implementation="xla")`',
        "tests/nn_test.py",
        "DotProductAttention",
    ),
}
