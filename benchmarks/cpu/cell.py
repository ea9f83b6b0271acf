"""One candidate on one case in a fresh process: its results for the check, or its time and peak memory."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from ring_attn_core.reference import oracle
from ring_attn_core.reference.tolerance import bound, relative_error

from ..support.process import Memory, answer, argument, run_fresh
from .candidates import CANDIDATES, Case

RESULTS = ("out", "dq", "dk", "dv")


def check(name: str, case: Case) -> dict[str, tuple[float, float]]:
    """Return the relative error against float64 and its bound, for out and each gradient."""
    candidate = CANDIDATES[name]
    with tempfile.TemporaryDirectory(prefix="ring-attn-") as folder:
        task = {"candidate": name, "case": case, "save": folder}
        run_fresh(__name__, task, candidate.processes, candidate.environment)
        ranks = [dict(np.load(f"{folder}/{rank}.npz")) for rank in range(candidate.processes)]
    positions = np.concatenate([rank["positions"] for rank in ranks])
    order = np.argsort(positions)[: case.tokens]
    q, k, v, dout = case.inputs()
    exact = oracle.exact(q, k, v, case.band, dout)
    plain = oracle.plain(q, k, v, case.band, dout, "float32")
    found = {}
    for result in RESULTS:
        whole = np.concatenate([rank[result] for rank in ranks], 1)[:, order]
        truth = getattr(exact, result)
        found[result] = (relative_error(whole, truth), bound(getattr(plain, result), truth, "float32"))
    return found


def measure(name: str, case: Case, passes: str, repeats: int) -> dict[str, Any]:
    """Return the median seconds of the slowest rank and the sum of the ranks' peak bytes, or why it was refused."""
    candidate = CANDIDATES[name]
    task = {"candidate": name, "case": case, "passes": passes, "repeats": repeats}
    ranks = run_fresh(__name__, task, candidate.processes, candidate.environment)
    refused = next((rank["refused"] for rank in ranks if "refused" in rank), None)
    if refused:
        return {"refused": refused}
    times = [max(repeat) for repeat in zip(*(rank["times"] for rank in ranks), strict=True)]
    return {"seconds": median(times), "times": times, "peak_bytes": sum(rank["peak"] for rank in ranks)}


def _time(run: Callable[[], Any], meet: Callable[[], Any], repeats: int) -> dict[str, Any]:
    memory = Memory()
    times = []
    try:
        run()
        for _ in range(repeats):
            meet()
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
    except MemoryError as error:
        return {"refused": str(error)}
    return {"times": times, "peak": memory.peak()}


def main() -> None:
    task = argument()
    prepared = CANDIDATES[task["candidate"]].prepare(Case(*task["case"]), task["rank"], task["store"])
    if "save" in task:
        results = dict(zip(RESULTS, map(np.asarray, prepared.both()), strict=True))
        np.savez(f"{task['save']}/{task['rank']}.npz", positions=prepared.positions, **results)
        answer(None)
    else:
        run = prepared.forward if task["passes"] == "forward" else prepared.both
        answer(_time(run, prepared.meet, task["repeats"]))
    prepared.meet()


if __name__ == "__main__":
    main()
