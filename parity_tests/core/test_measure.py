"""``ring-attn doctor --measure``: the record that follows from times, its table, its file, and times of two CPU ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from ring_attn_cli.doctor import measure
from ring_attn_cli.doctor.repeats import REPEATS, SERIES, WARM_UP, Repeats
from ring_attn_cli.doctor.timings import FITTED, NARROW, OF_GPU, Points, Timings, line, record
from ring_attn_cli.main import app
from ring_attn_core.plan.machine import H100, H200, NOISE, OPTIONAL, Machine
from ring_attn_core.plan.measured import stored

PEERS = {name: getattr(H100, name) for name in OPTIONAL} | {"noise": 0.02}
EXPECTED = replace(H200, links=((4, 160e9),), forward_state=8 * 129 / H200.copies, network_latency=H200.latency, **PEERS)
"""The record of four H200s, with what one host does not measure."""


def times(machine: Machine = EXPECTED) -> Timings:
    """Return the times that a machine would have, at half the rate for narrow heads."""

    def attention(operations: float, rate: float, step: float) -> dict[int, tuple[tuple[float, float], ...]]:
        of = lambda n, dim, slower: OF_GPU.heads * (operations * n * n * dim * slower / rate + step * n)
        return {dim: tuple((n, of(n, dim, slower)) for n in OF_GPU.tokens) for dim, slower in ((NARROW, 2), (FITTED, 1))}

    sent = lambda rate, latency: tuple((size, latency + size / rate) for size in OF_GPU.bytes)
    return Timings(
        device=machine.name,
        memory=machine.memory,
        heads=OF_GPU.heads,
        forward=attention(4, machine.forward_rate, machine.forward_step),
        backward=attention(10, machine.backward_rate, machine.backward_step),
        link=sent(machine.links[0][1], machine.latency),
        collective=sent(machine.collective, 1e-5),
        copy=sent(machine.copies, 1e-6),
        host_forward=machine.host_forward,
        host_backward=machine.host_backward,
        host_send=machine.host_send,
        host_copy=machine.host_copy,
        noise=machine.noise,
        contention=machine.contention,
        peer=sent(machine.peer, machine.peer_latency),
        host_pull=(machine.host_pull_forward, machine.host_pull_backward),
        host_push=(machine.host_push_forward, machine.host_push_backward),
    )


def numbers(machine: Machine) -> dict[str, float]:
    return {name: value for name, value in vars(machine).items() if isinstance(value, float)} | {"link": machine.links[0][1]}


def test_the_record_of_a_machine_follows_from_its_times():
    found = record([times()] * 4, EXPECTED.network)
    assert numbers(found) == pytest.approx(numbers(EXPECTED), rel=1e-6)
    assert (found.name, found.links[0][0]) == (EXPECTED.name, 4)
    assert times().rate(NARROW, True) == pytest.approx(EXPECTED.backward_rate / 2)


def test_each_number_is_that_of_the_slowest_rank():
    slow = times(replace(EXPECTED, forward_rate=3e14, latency=1e-3))
    found = record([times(), slow], EXPECTED.network)
    assert (found.forward_rate, found.latency) == (pytest.approx(3e14), pytest.approx(1e-3))
    assert found.backward_rate == pytest.approx(EXPECTED.backward_rate)


def test_a_rank_without_copies_from_a_peer_leaves_them_out_of_the_record():
    alone = replace(times(), peer=(), no_peer="rank 1 is on another host", host_pull=(0.0, 0.0), host_push=(0.0, 0.0))
    found = record([times(), alone], EXPECTED.network)
    assert (found.peer, found.contention) == (0.0, pytest.approx(EXPECTED.contention))


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1, 3.0), (2, 5.0), (10, 21.0)], (1.0, 2.0)),
        ([(1, 1.0), (2, 4.0)], (0.0, 1.2)),
        ([(1, 3.0), (10, 2.0)], (0.0, 0.2)),
    ],
    ids=["a line", "below zero", "faster"],
)
def test_a_line_has_no_negative_latency_and_no_negative_rate(points, expected):
    found = line(points)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pretend that this machine has two GPUs, whose times are known, and a user with an empty home."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(measure, "gpus_here", lambda: 2)
    monkeypatch.setattr(measure, "measured", lambda framework, ranks, gpus: [times()] * ranks)


def doctor(*arguments: str):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor", "--measure", *arguments])


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_record_is_printed_and_saved_for_its_framework(framework: str, two_gpus: None):
    pytest.importorskip(framework)
    done = doctor("--framework", framework, "--network", "25")
    assert done.exit_code == 0, done.output
    saved = stored(framework, H200.name)
    assert saved == record([times()] * 2, 25e9)
    assert stored({"torch": "jax", "jax": "torch"}[framework], H200.name) is None
    for words in (
        "NVIDIA H200, 2 ranks",
        "640 TFLOP/s forward, 511 backward",
        "160 GB/s after 28 us",
        "25 GB/s",
        "28, 460, 16, 34 us",
        "374 GB/s after 5 us",
        "70% of its time longer",
        "220 / 600, 245 / 620 us",
    ):
        assert words in done.output
    assert f"{framework}-NVIDIA-H200.json" in done.output


def test_the_reason_is_printed_if_gpus_do_not_share_memory(two_gpus: None, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(measure, "measured", lambda *_: [replace(times(), peer=(), no_peer="the GPU of rank 0 is alone")] * 2)
    assert "not measured: the GPU of rank 0 is alone" in doctor("--framework", "torch").output


class Runs:
    """Runs whose seconds are known: each call of ``run`` takes the next of them, and the last one again and again."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.called = seconds, 0

    def run(self) -> float:
        self.called += 1
        return self.seconds[min(self.called, len(self.seconds)) - 1]


WARM = (1.0, 1.0)
NOISY = (1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0)
"""A series whose halves differ by 100 %."""


def test_one_slow_repeat_is_no_noise_and_a_series_ends():
    runs, repeats = Runs(*WARM, 1.0, 1.0, 9.0, 1.05, 1.0, 1.05, 1.0), Repeats()
    assert repeats.seconds([runs.run]) == [1.0]
    assert repeats.noise == pytest.approx(0.05)
    assert runs.called == len(WARM) + REPEATS


def test_a_noisy_series_is_repeated_and_the_quietest_counts():
    runs, repeats = Runs(*WARM, *NOISY, *(1.5,) * REPEATS), Repeats()
    assert repeats.seconds([runs.run]) == [1.5]
    assert repeats.noise == 0
    worse = [each * 3 for each in NOISY[:6]] + [9.0]
    still = Runs(*WARM, *worse, *(each + 1 for each in NOISY), *worse, *worse)
    assert repeats.seconds([still.run]) == [2.0]  # halves of 2 and 3: less noise than 3 and 6
    assert repeats.noise == pytest.approx(0.5)
    assert still.called == len(WARM) + SERIES * REPEATS


def test_further_series_end_when_their_time_is_spent():
    clock = iter(range(0, 10**6, 1000))
    runs, repeats = Runs(*WARM, *NOISY * SERIES), Repeats(now=lambda: float(next(clock)))
    repeats.seconds([runs.run])
    assert runs.called == len(WARM) + 2 * REPEATS
    assert repeats.spare < 0
    none = Runs(*WARM, *NOISY)
    Repeats(spare=0.0).seconds([none.run])
    assert none.called == len(WARM) + REPEATS


def test_runs_warm_up_until_two_rounds_agree_but_not_for_ever():
    runs, repeats = Runs(9.0, 3.0, 1.0, 1.05), Repeats()
    assert repeats.seconds([runs.run]) == [1.05]
    assert runs.called == 4 + REPEATS
    never = Runs(*(2.0**n for n in range(WARM_UP)), *(1.0,) * REPEATS)
    assert repeats.seconds([never.run]) == [1.0]
    assert never.called == WARM_UP + REPEATS


def test_runs_take_turns_so_a_drift_cancels_in_their_difference():
    ticks = itertools.count()
    run = lambda seconds: seconds * (1 + 0.001 * next(ticks))
    once, twice = Repeats().seconds([lambda: run(1.0), lambda: run(2.0)])
    assert twice / once == pytest.approx(2, abs=0.01)


def test_all_ranks_repeat_if_one_of_them_is_noisy():
    runs, repeats = Runs(1.0), Repeats()
    flags = iter([False, True, True, False])  # warm; noisy twice elsewhere, then quiet
    asked: list[bool] = []
    repeats.on_any_rank = lambda flag: asked.append(flag) or next(flags)
    repeats.seconds([runs.run])
    assert asked == [False] * 4
    assert runs.called == len(WARM) + 3 * REPEATS


def test_a_gpu_is_busy_before_the_host_launches_what_is_timed(monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch")
    from ring_attn_cli.doctor.torch_side import BURST, Clock

    order: list[str] = []
    event = lambda name: SimpleNamespace(record=lambda: order.append(name), synchronize=lambda: None, elapsed_time=lambda _: 6e3)
    clock = Clock(torch.device("cpu"))
    vars(clock).update(device=torch.device("cuda"), begin=event("begin"), end=event("end"))
    monkeypatch.setattr(clock, "_wait", lambda: order.append("wait"))
    monkeypatch.setattr(clock, "_occupy", lambda: order.append("occupy"))
    assert clock._once(lambda: order.append("run")) == 6 / BURST
    assert order == ["wait", "occupy", "run", "begin", *["run"] * BURST, "end"]


def test_the_time_to_launch_a_run_of_jax_is_not_in_its_time(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("jax")
    from ring_attn_cli.doctor.jax_side import JaxClock

    clock = JaxClock(gpus=True)
    monkeypatch.setattr(clock, "_in_a_row", lambda run, number: 5.0 + 0.25 * number)
    assert clock._once(lambda: None) == 0.25


@pytest.mark.parametrize("noise", [0.1, 0.34])
def test_a_noisy_record_says_so_and_is_saved_with_a_warning(noise: float, two_gpus: None, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(measure, "measured", lambda *_: [times(), replace(times(), noise=noise)])
    done = doctor("--framework", "torch")
    words = "warning: repeats of a measurement still differ by 34%, more than 10%"
    assert (words in done.output) == (noise > 0.1) == ("warning" in done.output)
    assert ('"auto" takes the ring with it: stop the other programs' in done.output) == (noise > 0.1)
    saved = stored("torch", H200.name)
    assert saved is not None and saved.noise == noise


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "points", [((4096.0, 0.01), (16384.0, 0.4)), ((4096.0, 0.4), (16384.0, 0.5))], ids=["below zero", "faster"]
)
def test_times_of_attention_that_no_line_fits_make_a_record_noisy(points: Points, backward: bool):
    odd = replace(times(), **{"backward" if backward else "forward": {NARROW: points, FITTED: points}})
    assert record([times(), odd], EXPECTED.network).noise > NOISE


def test_times_and_rates_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="a measured time is not above 0, so nothing was saved: run ring-attn doctor"):
        record([times(), replace(times(), peer=((2.0**20, -1e-6),))], EXPECTED.network)
    with pytest.raises(ValueError, match="forward_rate must be at most 990 TFLOP/s, the peak of NVIDIA H200"):
        record([times(), replace(times(), forward={NARROW: LONG, FITTED: LONG})], EXPECTED.network)


LONG = ((4096.0, 1e-5), (16384.0, 16e-5))
"""Times of attention at a rate of thousands of TFLOP/s."""


def test_on_cpus_the_command_says_that_auto_stays_the_ring(two_gpus: None, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(measure, "gpus_here", lambda: 0)
    done = doctor("--framework", "torch")
    assert 'on CPUs "auto" stays the ring' in done.output
    assert "2 ranks" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "transfers are measured between at least 2 ranks, got 1"),
        (["--ranks", "3"], "--ranks 3 is more than the 2 GPUs of this machine"),
        (["--ranks", "99999"], "--ranks 99999 ranks are more than one machine runs"),
        (["--network", "0"], "--network must be a number of GB/s above 0, got 0"),
        (["--network", "nan"], "--network must be a number of GB/s above 0, got nan"),
        (["--framework", "numpy"], "unknown framework 'numpy': choose one of both, torch, jax"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_answered_in_one_line_and_exit_status_2(arguments: list[str], message: str, two_gpus: None):
    done = doctor(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("ring-attn: ") and message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_two_cpu_ranks_are_measured(framework: str):
    pytest.importorskip(framework)
    found = measure.measured(framework, 2, gpus=False)
    assert len(found) == 2
    machine = record(found, 1e9)
    assert machine.name == "cpu"
    assert 1e8 < machine.forward_rate < 1e14
    assert machine.host_forward == machine.host_send == 0
    assert Machine.from_json(machine.to_json()) == machine
