"""Several processes that train one network; no other module asks for a rank.

`torchrun` starts them and tells each its rank. Every rank takes its share of each update; DDP, or FSDP2, adds the
gradients up, over NCCL where there are GPUs. Numbers and words are exchanged over gloo, on the CPU. One process is a
world of one: it runs the same code, and nothing is sent.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from diglot.errors import TrainingError
from diglot.model import Transformer

SECONDS_TO_ANSWER = 3.0  # in which whoever lost a rank tells the others that it is not itself the lost one


@dataclass(frozen=True)
class World:
    """The ranks that train together, and which of them this process is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on its machine
    timeout: float = 600.0
    num_here: int = 1  # ranks on its machine

    @property
    def is_first(self) -> bool:
        """The rank that writes."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """What every rank has to say (anything that JSON can), on every rank, in their order."""
        if self.size == 1:
            return [value]
        said = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        with self.naming_the_lost():
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(said)]))
            longest = max(int(length) for length in lengths)
            heard = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(heard, nn.functional.pad(said, (0, longest - len(said))))
        return [json.loads(text[: int(length)].numpy().tobytes()) for text, length in zip(heard, lengths, strict=True)]

    @contextmanager
    def first_goes_ahead(self) -> Generator[None]:
        """The block runs on the first rank of each machine, then on the others: what it makes they find made."""
        if self.local_rank > 0:
            self.gather(None)
        yield
        if self.local_rank == 0:
            self.gather(None)

    @contextmanager
    def naming_the_lost(self) -> Generator[None]:
        """Turn what a lost rank causes in the others into a sentence that names it."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or is_out_of_memory(error):
                raise
            store = cast("Any", dist.distributed_c10d)._get_default_store()
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            names = [f"diglot-{attempt}-waits-{rank}" for rank in range(self.size)]
            store.set(names[self.rank], "1")
            time.sleep(SECONDS_TO_ANSWER)
            lost = ", ".join(str(rank) for rank, name in enumerate(names) if not store.check([name])) or "unknown"
            raise TrainingError(
                f"rank {lost} was lost: it ended, or did not answer rank {self.rank} within {self.timeout:.0f} s "
                f"(train.rank_timeout). Start the run again; it goes on from its newest checkpoint. ({error})"
            ) from None


@contextmanager
def join(device: str, timeout: float) -> Generator[World]:
    """Join the ranks that torchrun started; alone, a world of one."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield World()
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    try:
        num_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        yield World(dist.get_rank(), dist.get_world_size(), local_rank, timeout, num_here)
    finally:
        dist.destroy_process_group()


def num_cores() -> int:
    """Cores that this process may use: in a container fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parallelize(model: Transformer, world: World, strategy: str, device: str) -> nn.Module:
    """The network as it is called in training: as it is, replicated on every rank, or shared out among them."""
    if world.size == 1:
        return model
    if strategy == "ddp":
        ids = [world.local_rank] if device == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True)
    mesh = init_device_mesh(device, (world.size,))
    for layer in (*model.encoder.layers, *model.decoder.layers):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def sync_gradients(model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
    """Around a micro-batch, its forward pass too: gradients are added up over the ranks with the last one alone."""
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    return nullcontext()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, of which each rank may hold a share."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_shared_out(model: nn.Module) -> bool:
    """Whether this rank holds a share of the weights alone."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def share_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor as a parameter is held: on its device, shared out as it is."""
    if isinstance(parameter, DTensor):
        return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)
    return tensor.to(parameter.device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on the CPU."""
    words = "can't allocate memory", "Cannot allocate memory", "bad_alloc", "can't start new thread"
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(word in str(error) for word in words)
