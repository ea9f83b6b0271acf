"""The suites of other projects that can run here, as data."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Suite:
    """One suite. ``module``: the file here that shows its tests to pytest. ``file``: of a checkout; "" if ``package`` holds the
    tests. ``select``: pytest's -k. ``needs``: packages that the tests import too. ``processes``: each rank is a
    process that runs every case. ``known``: by a part of a test's name, the suite's own assumption that it fails by."""

    module: str
    package: str
    file: str = ""
    select: str = ""
    needs: tuple[str, ...] = ()
    processes: bool = False
    known: dict[str, str] = field(default_factory=dict)

    def obstacle(self, source: Path | None) -> str | None:
        """Return why the suite cannot run, or None."""
        if missing := [name for name in (self.package, *self.needs) if find_spec(name) is None]:
            return f"{missing[0]} is not installed"
        if self.file and source is None:
            return f"it stands in a checkout: pass --source NAME=FOLDER, which holds {self.file}"
        if self.file and source and not (source / self.file).is_file():
            return f"{source} holds no {self.file}"
        return None

    def explain(self, case: str, reason: str) -> str:
        """Return the suite's own assumption that a case fails by, if it is known, else the reason in a line of Markdown.
        Leave out shapes and names of models, by which cases of one reason differ."""
        reason = re.sub(r"\[\d+(, \d+)*\]", "[...]", re.sub(r"\w+ForCausalLM", "the model", reason.replace("|", "\\|")))
        return next((words for part, words in self.known.items() if part in case), reason)

    def release(self, source: Path | None) -> str:
        """Return the package's version. FlashAttention's tests need no flash_attn: theirs is their folder's name."""
        return metadata.version(self.package) if self.package != "torch" or not source else source.name


SUITES = {
    "tokamax": Suite("tokamax_suite", "tokamax"),
    "jax": Suite("jax_suite", "jax", "tests/nn_test.py", "DotProductAttention"),
    "torch": Suite("torch_suite", "torch", needs=("expecttest",), processes=True),
    "transformers": Suite(
        "transformers_suite",
        "transformers",
        "tests/test_modeling_common.py",
        "eager_matches_sdpa_inference or batching_equivalence or model_outputs_equivalence",
        needs=("parameterized",),
        processes=True,
    ),
    "flash-attention": Suite(
        "flash_attention_suite",
        "torch",
        "tests/test_flash_attn.py",
        "not kvcache and not deterministic and not race",
        needs=("einops",),
        processes=True,
    ),
}
