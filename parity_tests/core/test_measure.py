"""``ring-attn doctor --measure``: the record that follows from times, its table, its file, and times of two CPU ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from ring_attn_cli.doctor import measure
from ring_attn_cli.doctor.timings import FITTED, NARROW, OF_GPU, Repeats, Timings, line, record
from ring_attn_cli.main import app
from ring_attn_core.plan.machine import H100, H200, OPTIONAL, Machine
from ring_attn_core.plan.measured import stored

PEERS = {name: getattr(H100, name) for name in OPTIONAL}
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
        noise=0.02,
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


def test_repeats_are_compared_by_halves_and_one_slow_repeat_is_no_noise():
    repeats = Repeats()
    assert repeats.shortest([2.0, 9.0, 3.0, 2.1, 2.2]) == 2.0
    assert repeats.noise == pytest.approx(0.05)
    assert repeats.shortest([3.0, 2.0]) == 2.0
    assert repeats.shortest([1.0, 1.0, 1.0]) == 1.0
    assert repeats.noise == pytest.approx(0.5)


@pytest.mark.parametrize("noise", [0.1, 0.34])
def test_a_noisy_record_is_saved_with_a_warning(noise: float, two_gpus: None, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(measure, "measured", lambda *_: [times(), replace(times(), noise=noise)])
    done = doctor("--framework", "torch")
    words = "warning: repeats of a measurement differ by 34%, more than 10%"
    assert (words in done.output) == (noise > 0.1) == ("warning" in done.output)
    assert stored("torch", H200.name) is not None


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


@pytest.mark.exhaustive
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
