"""On which cases do JAX and PyTorch give the same bits on a GPU, and how far are both from the truth?

    pytest parity_tests/gpu/test_kernels.py --junitxml=bits.xml && python -m benchmarks.bits bits.xml

Several files, from parts of the suite, give one table.

Each row is a case of the GPU suite: the requested backend, the arrays that are not bitwise equal in both frameworks, and the
largest error of out, lse and the gradients against float64, as a share of its computed bound (at most 1).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from ..support import report


def rows(path: Path) -> list[dict[str, Any]]:
    """Return a row for each compared case; a failed or skipped case has no row."""
    found = []
    for test in ElementTree.parse(path).iter("testcase"):
        properties = {p.get("name", ""): p.get("value", "") for p in test.iter("property")}
        if "differing" in properties:
            share = {name: float(value) for name, value in json.loads(properties["shares"]).items()}
            row = {"case": properties["case"], "backend": properties["backend"], "differing": json.loads(properties["differing"])}
            found.append({**row, "share_of_bound": round(max(share.values()), 3)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog=report.program(), description=report.first_line(__doc__))
    parser.add_argument("junit", type=Path, nargs="+", help="what pytest --junitxml wrote")
    parser.add_argument("--out", default="bits-h200", help="name of the result file")
    options = parser.parse_args()
    table = [row for path in options.junit for row in rows(path)]
    result = {"question": report.first_line(__doc__), **report.environment()}
    result["hardware"] = {"gpu": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
    result["cases"] = len(table)
    result["cases_equal_to_the_bit"] = sum(not row["differing"] for row in table)
    result["largest_share_of_bound"] = max((row["share_of_bound"] for row in table), default=None)
    result["rows"] = table
    print(
        f"{result['cases_equal_to_the_bit']} of {len(table)} cases equal to the bit; written: {report.save(options.out, result)}"
    )


if __name__ == "__main__":
    main()
