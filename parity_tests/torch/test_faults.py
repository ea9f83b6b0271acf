"""A rank that dies, stays away or calls with another shape: the others raise an error that says so, and no process hangs.

A rank is killed at a random event of a pass: before it starts a transfer, before it waits for one, before it computes a step.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.plan.step_names import place_name
from ring_attn_torch import Gather, TwoLevel, Ulysses, full, ring_attention
from ring_attn_torch.attend.blockwise import Blockwise
from ring_attn_torch.ring import collectives, loop, transfer
from ring_attn_torch.ring.step import Ring

from ..support import warm
from ..support.selection import first

RANKS = 4
STRATEGIES = {
    "ring": ("ring", 4),
    "direct": ("direct", 4),
    "two_way": ("two_way", 4),
    "gather": ("gather", 1),
    "ulysses": ("ulysses", 1),
    "in pairs": (Ulysses(ranks=2), 2),
    "two_level": (TwoLevel(ranks=2), 4),
    "by heads": (Gather(groups=2), 2),
}
"""Each strategy and the number of its steps on four ranks."""

TIMES = int(os.environ.get("FAULTS", "20"))
SLACK = 60
"""Seconds beyond the group's timeout after which a process counts as hanging. A busy machine is slow."""


class Said(NamedTuple):
    """The last words of a rank: its error, or the place of its death, and when."""

    error: str
    words: str
    at: float


def attend(strategy: Any, tokens: int = 6) -> Callable[[], None]:
    """Return a function that runs a forward and a backward of shards of ``tokens``."""
    q, k = (torch.ones(1, tokens, heads, 4, requires_grad=True) for heads in (4, 2))
    return lambda: ring_attention(q, k, k, mask=full(), strategy=strategy).sum().backward()


def dies(rank: int, call: Callable[[], None], say: Callable[..., None], draw: float, how: str) -> None:
    """Die at an event of the next call; ``draw`` from 0 to 1 chooses which."""
    events, last, passes = 0, 0, []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def event(*arguments: Any, **named: Any) -> Any:
            nonlocal events
            events += 1
            if events == last:
                this = passes[-1]
                say("dies", f"{place_name(this._ring.plan, this._number)}, {this._name}")
                os.kill(os.getpid(), signal.SIGKILL) if how == "SIGKILL" else os._exit(1)
            return function(*arguments, **named)

        return event

    def entered(this: loop.RingPass) -> loop.RingPass:
        passes.append(this)
        return this

    targets = [(transfer.Transfer, "__init__"), (transfer.Transfer, "wait"), (collectives, "all_gather_single")]
    targets += [(Blockwise, name) for name in ("attend", "attend_backward")]
    for owner, name in targets:
        patch.object(owner, name, counted(getattr(owner, name))).start()
    patch.object(loop.RingPass, "__enter__", entered).start()
    call()
    events, last = 0, 1 + int(draw * events)
    call()


def stays_away(rank: int, call: Callable[[], None], say: Callable[..., None]) -> None:
    """Let the others begin, and come to nothing any more."""
    call()
    say("waits", "")
    time.sleep(600)


def never_comes(rank: int, call: Callable[[], None], say: Callable[..., None]) -> None:
    """Join the group, and make no call."""
    say("waits", "")
    time.sleep(600)


def takes_another_shape(rank: int, call: Callable[[], None], say: Callable[..., None], strategy: Any) -> None:
    attend(strategy, 8)()


def work(rank: int, store: str, strategy: Any, fault: tuple[Any, ...] | None, timeout: float, pipe: Connection) -> None:
    """Do the work of a rank. ``fault``: the function of the rank that has one, and its arguments."""
    torch.set_num_threads(1)
    say = lambda error, words: pipe.send(Said(error, words, time.monotonic()))
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=timeout), RANKS, rank)
    call = attend(strategy)
    try:
        if fault is not None:
            fault[0](rank, call, say, *fault[1:])
        for _ in range(5):
            call()
    except Exception as error:
        say(type(error).__name__, str(error))


def ranks_with(folder: Path, strategy: Any, victim: int, fault: tuple[Any, ...], timeout: float, name: str = "") -> list[Said]:
    """Start the ranks, one of them with a fault, and return what each said last. Fail if one hangs."""
    context, store = warm.context("torch"), str(folder / f"{fault[0].__name__} {name}")
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    ranks = [
        context.Process(target=work, args=(rank, store, strategy, fault if rank == victim else None, timeout, end))
        for rank, (_, end) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    for _, end in pipes:
        end.close()
    try:
        until = time.monotonic() + timeout + SLACK
        for rank, process in enumerate(ranks):
            if rank != victim:
                process.join(until - time.monotonic())
                assert process.exitcode == 0, (
                    f"rank {rank} hangs" if process.exitcode is None else f"rank {rank}: {process.exitcode}"
                )
        assert all(pipe.poll() for pipe, _ in pipes), "a rank ended without a word"
        return [pipe.recv() for pipe, _ in pipes]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def check(said: list[Said], victim: int, steps: int) -> float:
    """Check the errors of all ranks but the victim. Return the seconds from its end to the last of them."""
    begun = rf"(before |after |)ring step [1-{steps}] of {steps}, (forward|backward): "
    for rank, words in enumerate(said):
        if rank != victim:
            assert words.error == "LostRank", words
            assert re.match(begun + rf"rank {rank} lost the ring while it waited for rank \d", words.words), words
    assert any(f"rank {victim}, " in words.words for words in said), said
    return max(words.at for words in said) - said[victim].at


KILLED = [("ring", 0.6), ("ring", 0.1), ("direct", 0.6), ("two_way", 0.1), ("gather", 0.1), ("ulysses", 0.6), ("in pairs", 0.1)]


@pytest.mark.parametrize(("strategy", "draw"), first(dict.fromkeys([*KILLED, *product(STRATEGIES, (0.6, 0.1))]), 2, len(KILLED)))
def test_each_rank_names_the_step_at_which_it_lost_a_rank_that_was_killed(tmp_path, strategy, draw):
    of, steps = STRATEGIES[strategy]
    check(ranks_with(tmp_path, of, 3, (dies, draw, "SIGKILL"), 60), 3, steps)


@pytest.mark.campaign
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_rank_hangs_wherever_another_is_killed(tmp_path, strategy):
    of, steps = STRATEGIES[strategy]
    rng, seconds, places = random.Random(strategy), [], set()
    for number in range(TIMES):
        (folder := tmp_path / str(number)).mkdir()
        victim, fault = rng.randrange(RANKS), (dies, (number + rng.random()) / TIMES, rng.choice(["SIGKILL", "exit"]))
        said = ranks_with(folder, of, victim, fault, 60)
        seconds.append(check(said, victim, steps))
        places.add(said[victim].words)
    print(f"{strategy}: {TIMES} kills in {len(places)} places, errors after {max(seconds):.2f} s at most")
    assert TIMES < 20 or {place.partition(",")[2] for place in places} == {" forward", " backward"}


TIMEOUT = 8
"""Seconds that ranks wait for one that is away. Those of every strategy wait at once."""


@pytest.fixture(scope="module")
def without_a_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[list[Said]]]:
    """Return the ranks' words about rank 2, or the failure of their test: by strategy, if it misses a repeated call.

    By "" if it never comes: the ranks compare their problem before any strategy begins.
    """
    folder = tmp_path_factory.mktemp("stores")
    faults = {"": ("ring", never_comes)} | {name: (strategy, stays_away) for name, (strategy, _) in STRATEGIES.items()}
    with ThreadPoolExecutor(len(faults)) as at_once:
        return {
            name: at_once.submit(ranks_with, folder, strategy, 2, (fault,), TIMEOUT, name)
            for name, (strategy, fault) in faults.items()
        }


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_stays_away_from_a_repeated_call_is_lost_after_the_timeout(without_a_rank, strategy):
    said = without_a_rank[strategy].result()
    assert TIMEOUT - 1 <= check(said, 2, STRATEGIES[strategy][1]) < TIMEOUT + SLACK


@pytest.mark.exhaustive
def test_a_rank_that_never_comes_is_named_by_all_others_after_the_timeout(without_a_rank):
    said = without_a_rank[""].result()
    for words in said[:2] + said[3:]:
        assert words.error == "RuntimeError"
        assert "ring_attention was reached by 3 of 4 ranks: rank 2 did not come to the same call" in words.words
        assert TIMEOUT - 1 <= words.at - said[2].at < TIMEOUT + SLACK


@pytest.mark.parametrize("strategy", first(STRATEGIES, 1, 1))
def test_a_rank_of_another_shape_is_an_error_of_all_ranks(tmp_path, strategy):
    of = STRATEGIES[strategy][0]
    said = ranks_with(tmp_path, of, 1, (takes_another_shape, of), 60)
    assert {words[:2] for words in said} == {said[0][:2]}
    assert said[0].error == "ValueError"
    assert "the ranks of this ring disagree on q_shape: [1, 6, 4, 4] on rank 0, [1, 8, 4, 4] on rank 1" in said[0].words


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_the_error_of_a_lost_rank_says_where_the_pass_was(number, waits):
    """Number 0 is before the first step, 1 and 2 are steps, 3 is after the last. ``waits``: for the step's keys."""
    plan = RingPlan("contiguous", full(), 2, 4)

    def lose() -> None:
        raise transfer.lost_error(RuntimeError("closed"), "rank 1", None)

    def circulate() -> Iterator[Any]:
        for step in (1, 2):
            if waits and step == number:
                lose()
            yield step

    def run() -> None:
        with loop.RingPass(Ring(plan, None), "backward") as this:
            if number == 0:
                lose()
            for step in this.steps(circulate()):
                if step == number:
                    lose()
            lose()

    places = "before ring step 1", "ring step 1", "ring step 2", "after ring step 2"
    words = f"^{places[number]} of 2, backward: rank 0 lost the ring while it waited for rank 1:"
    with pytest.raises(transfer.LostRank, match=words):
        run()
