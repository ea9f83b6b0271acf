"""Memory that the GPUs of all ranks can reach, and the flags by which the streams of different ranks wait for each other.

Symmetric memory of torch maps one buffer of each rank into all ranks of a group. A rank copies from and to another rank's buffer
by the copy engine, without a kernel. A flag is a 32-bit number in a rank's buffer. Another rank's stream writes it, and the
rank's own stream waits for it (``write_value``, ``wait_value`` of ``driver.py``), so the host does not wait. Each write gives a
flag a larger value than before.

    buffer of a rank    flags | inbox: slots of gradients | slots of keys
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn_core.kernels import driver

from ..attend.keys import Keys
from .agreement import exchange, timeout
from .groups import rank_in, ranks_of
from .peer_access import rendezvous

FLAG_BYTES = 4096
"""Bytes of a buffer that hold its flags."""

ALIGNMENT = 256
"""Bytes to which each array in a buffer is aligned."""

GRADIENT_SLOTS, KEY_SLOTS = 2, 3
"""The number of slots in a rank's buffer for gradients, and for keys."""

BEGUN, GRADIENT_ROOM, KEY_ROOM, GRADIENTS, KEYS = range(5)
"""The kinds of flags. The first three have one flag for each rank, the last two one for each slot.

``strategies/push.py`` says when a rank raises each flag.
"""

MAX_VIEWS = 4096
"""The largest number of views of the buffers that are cached."""

LONGEST_NAP = 0.2
"""The longest time between two queries of an event, in seconds."""

LAST_WORDS = 10.0
"""The longest time, in seconds, from the decision to end a process to its end. Meanwhile it asks its GPU which ranks are late."""


class Peers:
    """The buffers of all ranks of a ring. All ranks construct, use and replace them in the same calls. ``keys``,
    ``gradients``: bytes of a slot. ``number``: passes begun, equal on all ranks. ``running``: a pass has not ended. The main
    stream is the caller's current stream; a second stream runs the copies to and from other ranks."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, keys: int, gradients: int) -> None:
        self.rank, self.ranks, self.device = rank_in(group), ranks_of(group), device
        self.keys, self.gradients, self.number, self.running = keys, gradients, 0, False
        self._views: dict[tuple[int, int, torch.Size, torch.dtype], Tensor] = {}
        self.neighbours: list[int] = []
        """The ranks with which this rank exchanges the signal BEGUN in the current pass."""
        self.allocate(group, FLAG_BYTES + GRADIENT_SLOTS * gradients + KEY_SLOTS * keys)
        exchange("the memory of peers", None, group)  # no rank may write a flag before its owner has set it to 0

    def allocate(self, group: dist.ProcessGroup, size: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self._buffer = symmetric.empty(size, dtype=torch.uint8, device=self.device)
        self._handle = rendezvous(self._buffer, group, patience := timeout(group, self.device.type))
        self._buffer[:FLAG_BYTES].zero_()
        self._flags_at = [self.bytes_of(rank, 0, FLAG_BYTES).data_ptr() for rank in range(self.ranks)]
        self.side = torch.cuda.Stream(self.device, priority=-1)
        self._ended: Any = None
        torch.cuda.synchronize(self.device)
        watch = self._watch = Watch(weakref.ref(self), patience)
        weakref.finalize(self, watch.add, None)

    def begin(self) -> None:
        """Begin a pass once the previous one ends. After a failed one raise RuntimeError, since its flags may never come."""
        if self.running:
            raise RuntimeError(
                'strategy="push" cannot go on after a call that ended with an error in the middle: make a new group'
            )
        self.number, self.running = self.number + 1, True
        self.await_end()

    def await_end(self) -> None:
        if self._ended is not None:
            torch.cuda.current_stream(self.device).wait_event(self._ended)

    def end(self, what: str) -> None:
        """Record the end of pass ``what``. If the GPU misses the group's timeout, end this process, with a message."""
        self.running = False
        self._ended = torch.cuda.current_stream(self.device).record_event()
        self._watch.add((self._ended, self.number, what))

    def bytes_of(self, rank: int, begin: int, count: int) -> Tensor:
        return self._handle.get_buffer(rank, (count,), torch.uint8, begin)

    def raise_flag(self, rank: int, kind: int, which: int, value: int, side: bool = False) -> None:
        """Set a flag of ``rank`` to ``value`` once the main stream, or the second if ``side``, has done earlier work. ``which``:
        the rank that sets the flag; for the kinds GRADIENTS and KEYS the slot."""
        address = self._flags_at[rank] + 4 * self._flag(kind, which)
        driver.write_value(self._stream(side), address, value & 0xFFFFFFFF)

    def await_flag(self, kind: int, which: int, value: int, side: bool = False) -> None:
        """Let the main or second stream wait until a flag of this rank is at least ``value``. Arguments: see ``raise_flag``."""
        address = self._flags_at[self.rank] + 4 * self._flag(kind, which)
        driver.wait_value(self._stream(side), address, value & 0xFFFFFFFF)

    def on_side(self) -> AbstractContextManager[Any]:
        """Return a context that queues copies on the second stream, after all work queued so far on the main stream."""
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.side)

    def keep_alive(self, x: Tensor) -> None:
        """Reserve the memory of a freed ``x`` until the second stream has done all work queued before ``x`` was freed."""
        x.record_stream(self.side)

    def read_flags(self) -> list[int]:
        """Return all flags of this rank, even while its streams wait."""
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            flags = self.bytes_of(self.rank, 0, FLAG_BYTES).to("cpu", non_blocking=True).view(torch.int32)
            torch.cuda.current_stream(self.device).synchronize()
        return flags.tolist()

    def late(self, number: int) -> list[int]:
        """Return those of the ``neighbours`` that have not begun pass ``number``, according to their BEGUN flags."""
        flags = self.read_flags()
        return [rank for rank in self.neighbours if flags[self._flag(BEGUN, rank)] < number]

    def inbox(self, rank: int, slot: int, like: Tensor) -> Tensor:
        """Return a slot for gradients in the buffer of ``rank``, with the shape and dtype of ``like``."""
        return self._view(rank, FLAG_BYTES + slot * self.gradients, like)

    def key_slot(self, rank: int, slot: int, like: Keys) -> Keys:
        """Return a slot for keys in the buffer of ``rank``, as arrays with the shapes and dtypes of ``like``."""
        begin, arrays = FLAG_BYTES + GRADIENT_SLOTS * self.gradients + slot * self.keys, []
        for x in like:
            arrays.append(None if x is None else self._view(rank, begin, x))
            begin += 0 if x is None else align_up(x.numel() * x.element_size())
        return Keys(*arrays)

    def _view(self, rank: int, begin: int, like: Tensor) -> Tensor:
        """Return the buffer of ``rank`` from byte ``begin`` as a cached tensor like ``like``, writable also in inference mode."""
        key = rank, begin, like.shape, like.dtype
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):
                found = self.bytes_of(rank, begin, like.numel() * like.element_size()).view(like.dtype).view(like.shape)
            self._views[key] = found
        return found

    def _flag(self, kind: int, which: int) -> int:
        return kind * self.ranks + which if kind <= GRADIENTS else GRADIENTS * self.ranks + GRADIENT_SLOTS + which

    def _stream(self, side: bool) -> int:
        return (self.side if side else torch.cuda.current_stream(self.device)).cuda_stream


class Watch(threading.Thread):
    """A thread that ends the process if a pass exceeds the group's timeout: a wait for a dead rank's flag never ends."""

    def __init__(self, peers: weakref.ref[Peers], patience: timedelta) -> None:
        super().__init__(daemon=True, name="ring_attn.peers")
        self._peers, self._patience = peers, patience.total_seconds()
        self._events: queue.SimpleQueue[tuple[Any, int, str] | None] = queue.SimpleQueue()
        self.start()

    def add(self, end: tuple[Any, int, str] | None) -> None:
        """Watch the end of a pass: its CUDA event, the pass's number, and its name for the error. None ends the thread."""
        self._events.put(end)

    def run(self) -> None:
        driver.exchange_capture_mode(driver.CAPTURE_RELAXED)
        while (end := self._events.get()) is not None:
            event, number, what = end
            began, nap = time.monotonic(), 0.001
            while not event.query():
                if time.monotonic() - began > self._patience:
                    self._give_up(number, what)
                time.sleep(nap)
                nap = min(2 * nap, LONGEST_NAP)

    def _give_up(self, number: int, what: str) -> None:
        peers = self._peers()
        if peers is None:
            return
        threading.Timer(LAST_WORDS, os._exit, (1,)).start()  # in case the GPU does not answer
        late = peers.late(number)
        names = ", ".join(f"rank {rank}" for rank in late)
        who = f"{names}, which did not come to it" if late else "a rank that came to it and then stopped"
        print(
            f"rank {peers.rank} lost the ring: {what} waited {self._patience:,.0f} s, the group's timeout, for {who}. The rank "
            "whose log ends first, without this message, is where to look. This process ends: its GPU waits for that rank",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


MAKERS: dict[str, type[Peers]] = {"cuda": Peers}
"""The class of the buffers, by device type."""

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Peers] = weakref.WeakKeyDictionary()


def peers_of(group: dist.ProcessGroup, keys: Keys, wide: torch.dtype) -> Peers:
    """Return the group's buffers. A slot fits ``keys``, or their gradients in the dtype ``wide``. The first call for a group, and
    a call with larger keys, is a collective that allocates and maps buffers."""
    if keys.kv.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            'strategy="push" cannot be captured in a CUDA graph, because its flags take other values at every call: pass '
            'strategy="ring"'
        )
    size = sum(align_up(x.numel() * x.element_size()) for x in keys if x is not None)
    gradients = align_up(keys.kv.numel() * wide.itemsize)
    found = _made.get(group)
    if found is not None:
        if found.keys >= size and found.gradients >= gradients:
            return found
        free(group)
        size, gradients = max(size, found.keys), max(gradients, found.gradients)
    made = _made[group] = MAKERS[keys.kv.device.type](group, keys.kv.device, size, gradients)
    return made


def free(group: dist.ProcessGroup) -> None:
    """Wait until no rank uses the group's buffers, and drop them, if there are any. All ranks call this."""
    if (found := _made.pop(group, None)) is not None:
        if found.device.type == "cuda":
            torch.cuda.synchronize(found.device)
        exchange("free the memory of peers", None, group)  # no rank may still read or write these buffers


def copy(to: Sequence[Tensor | None], source: Sequence[Tensor | None]) -> None:
    for there, here in zip(to, source, strict=True):
        if there is not None and here is not None:
            there.copy_(here, non_blocking=True)


def align_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
