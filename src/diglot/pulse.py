"""The pulse of a rank: what ranks tell each other beside the training, so that none waits for ever for another.

Each rank has a thread that tells the others every second, through the store that torchrun keeps, that it lives, or what
ended it. A rank that fails or is lost ends all the others, wherever they wait for it, with a sentence that names it:
even inside NCCL or gloo, whose waiting no exception ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import signal
import sys
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous  # pyright: ignore[reportUnknownVariableType]

from diglot.errors import DiglotError, RankError, on_one_line

BEAT = 1.0  # seconds between two signs of life
SECONDS_TO_ANSWER = 4.0  # in which a rank that lives has given a sign, or told what ended it
SECONDS_TO_END = 10.0  # in which a rank has ended after another failed, or it is ended
AGAIN = "Start the run again: it goes on from its newest checkpoint."


class Pulse(threading.Thread):
    """Tells the others that this rank lives and what ended it, and ends it when another ended or went silent."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float):
        super().__init__(name="pulse", daemon=True)
        self.store, self.rank, self.timeout = store, rank, timeout
        self.own: dict[str, Any] = {"pid": os.getpid(), "machine": machine(), "waits": False, "failed": ""}
        self.heard = [self.own] * size  # of every rank, the last sign
        self.silence = [0] * size  # beats since then: ours, not seconds, for to be stopped oneself is no alarm
        self.num_beats, self.wake, self.is_over = 0, threading.Event(), False
        store.set(f"pulse/{rank}", json.dumps(self.own))

    def run(self) -> None:
        """Beat until the end."""
        since_failure = 0
        while not self.is_over:
            try:
                self.beat()
            except RuntimeError:  # no store any more
                self.end(self.lost_store())
            since_failure += any(told["failed"] for told in self.heard)
            if since_failure * BEAT > SECONDS_TO_END:
                self.end(self.why())
            if not since_failure and max(self.silence) * BEAT > self.timeout:
                self.end(self.lost(self.silent(round(self.timeout / BEAT))))
            self.wake.wait(BEAT)
            self.wake.clear()

    def beat(self) -> None:
        """Give a sign, and look for those of the others."""
        self.store.set(f"pulse/{self.rank}", json.dumps({**self.own, "beat": self.num_beats}))
        for rank, text in enumerate(self.store.multi_get([f"pulse/{rank}" for rank in range(len(self.heard))])):
            told = json.loads(text)
            self.silence[rank] = 0 if told != self.heard[rank] else self.silence[rank] + 1
            self.heard[rank] = told
        self.num_beats += 1

    def tell(self, error: Exception) -> None:
        """Tell the others what ended this rank."""
        self.own["failed"] = str(error) if isinstance(error, DiglotError) else f"{type(error).__name__}: {error}"
        until, end = self.num_beats + 2, time.monotonic() + SECONDS_TO_ANSWER
        while self.is_alive() and self.num_beats < until and time.monotonic() < end:
            self.wake.set()
            time.sleep(BEAT / 50)

    def why(self) -> RankError:
        """Who is at fault that this rank waits in vain."""
        before, end = self.num_beats, time.monotonic() + SECONDS_TO_ANSWER
        self.own["waits"] = True
        while time.monotonic() < end:
            for rank, told in enumerate(self.heard):
                if told["failed"]:
                    return RankError(told["failed"], rank)
            time.sleep(BEAT / 20)
        if self.num_beats == before:
            return self.lost_store()
        # one that gives signs and does not wait as we do hangs in something else
        return self.lost(self.silent(2) or [rank for rank, told in enumerate(self.heard) if not told["waits"]])

    def silent(self, num_beats: int) -> list[int]:
        """The ranks without a sign for more than so many beats."""
        return [rank for rank, silence in enumerate(self.silence) if silence > num_beats]

    def lost(self, ranks: list[int]) -> RankError:
        """The sentence that names lost ranks. Those of this machine are ended: one that is stopped does not hear
        torchrun's request to end, for which torchrun would wait half a minute."""
        for told in (self.heard[rank] for rank in ranks if rank != self.rank):
            if told["machine"] == self.own["machine"]:
                with contextlib.suppress(OSError):
                    os.kill(told["pid"], signal.SIGKILL)
        names = ", ".join(f"rank {rank} on {self.heard[rank]['machine'].split()[0]}" for rank in ranks) or "a rank"
        return RankError(
            f"{names} was lost: it ended, or gave no sign for {self.timeout:.0f} s (train.rank_timeout). {AGAIN}"
        )

    def lost_store(self) -> RankError:
        """The sentence for where torchrun itself is gone."""
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return RankError(f"torchrun's store at {where} was lost, and its machine perhaps. {AGAIN}")

    def end(self, error: RankError) -> None:
        """End this process at once; what has to last is on disk."""
        if not self.is_over:
            complain(error)
            os._exit(1)


def meet(rank: int, size: int, timeout: float) -> tuple[Store, Pulse]:
    """The part of torchrun's store that belongs to these processes alone, and a pulse in it.

    That store outlives a restart, and with it the addresses of ranks that are no more, to which gloo would connect; and
    machines do not count restarts alike. So each process gives itself a name, and rank 0 says which belong together.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + timeout
    names: list[str] = []
    pulse: Pulse | None = None
    missing = [other for other in range(size) if other != rank]
    with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        store.set(f"diglot/{rank}", own)
        while time.monotonic() < end:
            if rank == 0:
                keys = [f"diglot/{other}" for other in range(size)]
                here = [store.get(key).decode() if store.check([key]) else "" for key in keys]
                if here != names:
                    store.set("diglot/names", json.dumps(here))
            if store.check(["diglot/names"]):
                names = json.loads(store.get("diglot/names"))
            if names[rank : rank + 1] == [own]:
                ours = PrefixStore(f"diglot/{names[0]}", store)
                pulse = pulse or Pulse(ours, rank, size, timeout)
                missing = [other for other in range(size) if not ours.check([f"pulse/{other}"])]
                if not missing:
                    return ours, pulse
            time.sleep(BEAT / 20)
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    raise RankError(
        f"rank {', '.join(str(other) for other in missing)} did not come within {timeout:.0f} s (train.rank_timeout): "
        f"was it started, and does every machine reach {where}?"
    )


def machine() -> str:
    """This machine, as torchrun tells it from others: its name, and its number among them."""
    return f"{platform.node()} {os.environ.get('GROUP_RANK', '0')}"


def complain(error: Exception) -> None:
    """Print an error; of ranks that have the same to say on one machine, one does. torchrun repeats it at its end."""
    text, rank = on_one_line(str(error)), os.environ.get("RANK")
    of = getattr(error, "rank", rank)
    named = f"rank {of}: {text}" if isinstance(error, DiglotError) and of is not None else text
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            told = {"py_callstack": named, "timestamp": str(int(time.time()))}
            with contextlib.suppress(OSError):
                Path(path).write_text(json.dumps({"message": {"message": named, "extraInfo": told}}), encoding="utf-8")
        try:
            store = TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                timeout=timedelta(seconds=SECONDS_TO_ANSWER),
            )
            place = machine(), os.environ.get("TORCHELASTIC_RESTART_COUNT"), text
            if store.add(f"diglot/said/{hashlib.sha256(repr(place).encode()).hexdigest()}", 1) > 1:
                return
        except RuntimeError:  # no store any more: rather twice than not at all
            pass
    print(f"diglot: {named}", file=sys.stderr, flush=True)
