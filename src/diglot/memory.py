"""How much goes through the network at once: found before the first update by trying, from the longest pair up."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from diglot.errors import ConfigError, TrainingError
from diglot.loader import MicroBatch, UpdateReader
from diglot.loss import smoothed_loss
from diglot.model import Transformer
from diglot.parallel import is_out_of_memory, sync_gradients
from diglot.run import Job

SHARE = 0.8  # of the free memory that a micro-batch may be expected to take
CGROUPS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def choose_micro_batch(job: Job, network: nn.Module, model: Transformer, reader: UpdateReader) -> int:
    """The recipe's, or for "auto" the largest that fits with pairs of the longest length; at most a whole update."""
    recipe, world = job.recipe, job.world
    if isinstance(recipe.data.micro_batch, int):
        return recipe.data.micro_batch
    if recipe.train.strategy == "fsdp" and world.size > 1:
        raise ConfigError("data.micro_batch = 'auto' cannot be tried with train.strategy = 'fsdp'; give a number.")
    device = model.output.weight.device
    pair = 2 * recipe.data.max_pieces
    num_src, num_tgt = (int(counts @ np.arange(len(counts))) for counts in reader.corpus.count_lengths())
    whole_update = int(1.3 * recipe.train.update_pieces * (num_src + num_tgt) / max(1, num_tgt) / world.size)
    moments = [torch.zeros_like(parameter) for parameter in model.parameters() for _ in range(2)]  # of Adam, soon
    before, num_pairs, fitted = used_memory(), 1, 0
    while not fitted or num_pairs * pair < 2 * whole_update:
        if (
            fitted
            and device.type == "cpu"
            and 2 * (used_memory() - before) > SHARE * (free_memory() + used_now() - before)
        ):
            break
        try:
            try_micro_batch(network, model, num_pairs, recipe.data.max_pieces, job.bf16)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            break
        finally:
            model.zero_grad()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        fitted, num_pairs = num_pairs, 2 * num_pairs
    del moments
    fitted = min(world.gather(fitted))
    if not fitted:
        raise TrainingError(
            f"memory is too small for one pair of data.max_pieces = {recipe.data.max_pieces} pieces a side: "
            "lower that, or choose a smaller network."
        )
    chosen = min(fitted * pair, max(pair, whole_update))
    job.reporter.say(f"{chosen:,} padded pieces go through the network at once (data.micro_batch).")
    return chosen


def try_micro_batch(network: nn.Module, model: Transformer, num_pairs: int, length: int, bf16: bool) -> None:
    """Forward and backward with so many pairs of a length."""
    device = model.output.weight.device.type
    ids, lengths = np.ones((num_pairs, length), np.int64), np.full(num_pairs, length, np.int64)
    micro = MicroBatch(ids, lengths, ids, lengths, np.arange(num_pairs))
    src, src_mask, tgt, tgt_mask, keys = micro.tensors(device)
    network.train()
    with sync_gradients(network, is_last=False), torch.autocast(device, torch.bfloat16, enabled=bf16):
        hidden = network(src, src_mask, tgt, keys)
        loss, _ = smoothed_loss(hidden[tgt_mask], model.output.weight, model.output.bias, tgt[tgt_mask], 0.1)
        loss.backward()


def used_memory() -> int:
    """The most bytes that this process has held in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def used_now() -> int:
    """The bytes that it holds now."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return used_memory()


def free_memory() -> int:
    """Bytes that this process can still get of what the machine has and the container and the shell allow."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            free = min(free, limit - size)
        limit, used = (path.read_text().strip() for path in CGROUPS)
        return free if limit == "max" else min(free, int(limit) - int(used))
    except (OSError, StopIteration, ValueError):  # another system, or no container
        return free
