"""How much goes through the network at once: found before the first update by trying, from the longest pair up."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from diglot.errors import TrainingError
from diglot.loader import MicroBatch, UpdateReader
from diglot.loss import smoothed_loss
from diglot.model import Transformer
from diglot.parallel import is_out_of_memory, sync_gradients
from diglot.run import Job

SHARE = 0.8  # of the free memory that a micro-batch may be expected to take: what is tried is not all that comes
COPIES = 7  # of the weights: they and both moments, as bytes and as a file, when saved; those of a forked worker
PROC, CGROUPS = Path("/proc/self"), Path("/sys/fs/cgroup")
# limit, use, and what of that is given back when asked for, in control groups of version 1 and 2
VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
VERSION_2 = "memory.max", "memory.current", ("active_file", "inactive_file")


def choose_micro_batch(job: Job, network: nn.Module, model: Transformer, reader: UpdateReader) -> int:
    """The recipe's, or for "auto" the largest that fits with pairs of the longest length, to a fifth; at most a whole
    update."""
    recipe, world = job.recipe, job.world
    if isinstance(recipe.data.micro_batch, int):
        return recipe.data.micro_batch
    pair = 2 * recipe.data.max_pieces
    num_src, num_tgt = (int(counts @ np.arange(len(counts))) for counts in reader.corpus.count_lengths())
    whole_update = int(1.3 * recipe.train.update_pieces * (num_src + num_tgt) / max(1, num_tgt) / world.size)
    most = max(1, -(-whole_update // pair))
    fitted = min(world.gather(largest_that_fits(job, network, model, most)))
    if not fitted:
        raise TrainingError(
            f"memory is too small for one pair of data.max_pieces = {recipe.data.max_pieces} pieces a side: "
            "lower that, or choose a smaller network."
        )
    chosen = min(fitted * pair, max(pair, whole_update))
    job.reporter.say(f"{chosen:,} padded pieces go through the network at once (data.micro_batch).")
    return chosen


def largest_that_fits(job: Job, network: nn.Module, model: Transformer, most: int) -> int:
    """How many of the longest pairs: doubled while they fit, then between the last that did and the first that did not.

    A GPU refuses what it has not got, and so does a shell's limit; a Linux machine or a container does not, but kills
    who uses it. So on a CPU nothing is tried that, by what the last try took, is not expected to fit.
    """
    length, on_cpu = job.recipe.data.max_pieces, job.device == "cpu"
    fitted, failed, taken, before = 0, sys.maxsize, 0, used_memory()
    with memory_of_others(job, model) as allowed:
        while fitted < most and failed - fitted > max(1, fitted // 4):
            num = min(max(1, 2 * fitted), most)
            num = num if num < failed else (fitted + failed) // 2
            expected = num * taken // max(1, fitted) if on_cpu else 0
            if expected <= allowed and fits(network, model, num, length, job.bf16):
                fitted, taken = num, peak_memory() - before
            else:
                failed = num
    return fitted


def fits(network: nn.Module, model: Transformer, num_pairs: int, length: int, bf16: bool) -> bool:
    """Whether so many pairs of a length go through the network, forward and backward."""
    device = model.output.weight.device.type
    ids, lengths = np.ones((num_pairs, length), np.int64), np.full(num_pairs, length, np.int64)
    micro = MicroBatch(ids, lengths, ids, lengths, np.arange(num_pairs))
    network.train()
    forget_peak()
    try:
        with sync_gradients(network, is_last=False):
            hidden, wanted = micro.through(network, device, bf16)
            with torch.autocast(device, torch.bfloat16, enabled=bf16):
                loss, _ = smoothed_loss(hidden, model.output.weight, model.output.bias, wanted, 0.1)
            loss.backward()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        model.zero_grad()
        if device == "cuda":
            torch.cuda.empty_cache()
    return True


@contextlib.contextmanager
def memory_of_others(job: Job, model: Transformer) -> Generator[float]:
    """What a micro-batch may be expected to take, while as much is held as the optimizer's moments and, on a CPU, all
    copies of the weights are going to take."""
    weights = list(model.parameters())
    free = free_memory() / job.world.local_size
    moments = [torch.empty_like(weight) for weight in weights for _ in range(2)]
    if job.device == "cpu":  # pages that nobody writes are held against a shell's limit alone: the rest is arithmetic
        num_bytes = sum(weight.nbytes for weight in weights)
        copies = np.empty(COPIES * num_bytes, np.uint8)
        yield SHARE * free - 2 * num_bytes - copies.nbytes
        return
    free, total = torch.cuda.mem_get_info()  # a share of it, so that in training fragments find their place
    torch.cuda.set_per_process_memory_fraction((SHARE * free + torch.cuda.memory_reserved()) / total)
    yield SHARE * free
    torch.cuda.set_per_process_memory_fraction(1.0)
    del moments


# ------------------------------------------------------------------- of a CPU


def used_memory() -> int:
    """The bytes that this process holds."""
    try:
        return int((PROC / "statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_memory()


def peak_memory() -> int:
    """The most bytes that it has held, since that was last forgotten if the system can."""
    try:
        lines = (PROC / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak() -> None:
    """Begin to look for a peak anew; where the system cannot, an older one makes us careful."""
    with contextlib.suppress(OSError):
        (PROC / "clear_refs").write_text("5")


def free_memory() -> int:
    """Bytes that this process can still get of what the machine has, and its containers and its shell allow."""
    left = [os.sysconf("SC_AVPHYS_PAGES") * resource.getpagesize()]
    with contextlib.suppress(OSError):  # another system
        lines = Path("/proc/meminfo").read_text().splitlines()
        left = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")] or left
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            left.append(limit - int((PROC / "statm").read_text().split()[0]) * resource.getpagesize())
        left += left_in_groups()
    return max(0, min(left))


def left_in_groups() -> Iterator[int]:
    """Bytes left in each control group that limits this process: its own, and those that hold it."""
    for line in (PROC / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        limit, use, given_back = VERSION_1 if controllers else VERSION_2
        root = CGROUPS / "memory" if controllers else CGROUPS
        own = root / path.lstrip("/")  # in a container it may not be seen, but what holds it is
        for group in (own, *own.parents):
            if not group.is_relative_to(root) or not (group / limit).exists():
                continue
            most = (group / limit).read_text().strip()
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            if most != "max":
                yield int(most) - int((group / use).read_text()) + sum(int(stat.get(name, 0)) for name in given_back)
