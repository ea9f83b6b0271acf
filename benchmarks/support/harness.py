"""The harness of the benchmarks: options, ranks in fresh processes, and a table and a saved result after each row."""

from __future__ import annotations

import argparse
import socket
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from . import report
from .process import run_fresh

FRAMEWORKS = "torch", "jax"
Default = bool | int | str | dict[str, bool] | list[Any] | tuple[Any, ...] | None


def options(doc: str | None, **defaults: Default) -> argparse.Namespace:
    """Parse the command line; the type of an option is that of its default.

    The option of a list takes some of its items, by default all. That of a dict takes some of its keys, by default those with a
    true value. That of a tuple takes any values of its type. False makes a flag, and None an optional integer.
    """
    parser = argparse.ArgumentParser(prog=report.program(), description=report.first_line(doc))
    for name, default in defaults.items():
        flag = "--" + name.replace("_", "-")
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, dict | list | tuple):
            choices = None if isinstance(default, tuple) else [*default]
            usual = [each for each in default if not isinstance(default, dict) or default[each]]
            parser.add_argument(flag, nargs="*", type=type(usual[0]), choices=choices, default=usual)
        else:
            parser.add_argument(flag, type=int if default is None else type(default), default=default)
    return parser.parse_args()


def taken(options: argparse.Namespace, problem: type[Any]) -> Any:
    """Return a ``problem`` (a NamedTuple) with its fields taken from the options of the same names."""
    return problem(**{name: getattr(options, name) for name in problem._fields if hasattr(options, name)})


def result_of(doc: str | None, **facts: object) -> dict[str, Any]:
    """Return the head of a stored result: the question, the environment with its GPUs, and ``facts``."""
    result = {"question": report.first_line(doc), **report.environment()}
    if torch.cuda.is_available():
        gpu = {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
        result["hardware"] = {**gpu, "capability": torch.cuda.get_device_capability(), **result["hardware"]}
    return result | facts


def record(doc: str | None, out: str, key: str, rows: Iterable[dict[str, Any]], **facts: object) -> None:
    """Print a table of the rows and save the result after each of them, so that a later failure loses nothing."""
    result = result_of(doc, **facts) | {key: []}
    for row in rows:
        result[key].append(row)
        Console(width=180).print(table(result[key]))
        print(report.save(out, result))


def table(rows: list[dict[str, Any]], title: str = "") -> Table:
    """Return a table with a column for each key of the rows, except those that hold lists."""
    columns = list(dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list)))
    found = Table(*columns, title=title or None, title_justify="left")
    for row in rows:
        found.add_row(*(f"{x:,.1f}" if isinstance(x := row.get(name, ""), float) and x > 999 else str(x) for name in columns))
    return found


def run_ranks(
    module: str, problem: Any, ranks: int, cpu: bool, environment: Mapping[str, str] | None = None, processes: int = 1
) -> list[Any]:
    """Call ``run(problem, place)`` of a module in fresh processes, one per rank in PyTorch; return the results.

    ``module``: a name that ends in "_jax", or any other for PyTorch. ``place``: a rank's device in PyTorch, the number of devices
    in JAX. ``processes``: in JAX, the number of processes that share the devices equally.
    """
    given = {"module": module, "problem": problem._asdict(), "ranks": ranks, "cpu": cpu, "processes": processes}
    if processes > 1:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            given["coordinator"] = f"localhost:{free.getsockname()[1]}"
    return run_fresh("benchmarks.support.rank", given, processes if module.endswith("jax") else ranks, environment)


def of_steps(found: list[dict[str, Any]], tokens: int, flops: float) -> dict[str, Any]:
    """Return the median step's seconds and rates, and the largest peak memory of a GPU. ``tokens``, ``flops``: per GPU."""
    seconds = median_of_slowest(found, "seconds")
    return {
        "seconds": round(seconds, 3),
        "all seconds": [[round(x, 3) for x in rank["seconds"]] for rank in found],
        "warm-up s": round(max(rank["first"] for rank in found), 1),
        "TFLOP/s a GPU": round(flops / seconds / 1e12, 1),
        "tokens/s a GPU": round(tokens / seconds),
        "peak GB": round(max(rank["peak"] for rank in found) / 1e9, 2),
        "losses": found[0]["losses"],
    }


def median_of_slowest(found: list[dict[str, Any]], name: str) -> float:
    """Return the median over the steps of the slowest rank's seconds."""
    return statistics.median(max(step) for step in zip(*(rank[name] for rank in found), strict=True))
