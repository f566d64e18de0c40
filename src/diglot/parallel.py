"""Several processes that train one network; no other module asks for a rank.

`torchrun` starts them and tells each its rank. Every rank takes its share of each update; DDP, or FSDP2, adds the
gradients up, over NCCL where there are GPUs. Numbers and words are exchanged over gloo, on the CPU. One process is a
world of one: it runs the same code, and nothing is sent. What ends one rank ends them all (`pulse.py`).
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import warnings
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from diglot.errors import Interrupted, RankError
from diglot.model import Transformer
from diglot.pulse import SECONDS_TO_END, Pulse, meet

PATIENCE = datetime.timedelta(days=365)  # where the work of one rank may take its time: its pulse tells that it lives


@dataclass(frozen=True)
class World:
    """The ranks that train together, and which of them this process is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on its machine
    local_size: int = 1  # ranks on its machine
    pulse: Pulse | None = None
    patient: Any = None  # the same ranks, for waits without an end

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

    def wait_for_all(self) -> None:
        """Go on when every rank is here, however long its work takes."""
        if self.size > 1:
            with self.naming_the_lost():
                dist.all_reduce(torch.zeros(1), group=self.patient)

    @contextmanager
    def first_goes_ahead(self) -> Generator[None]:
        """The block runs on the first rank of each machine, then on the others: what it makes they find made."""
        if self.local_rank > 0:
            self.wait_for_all()
        yield
        if self.local_rank == 0:
            self.wait_for_all()

    @contextmanager
    def naming_the_lost(self) -> Generator[None]:
        """Turn what the loss of a rank causes in the others into a sentence that names it."""
        try:
            yield
        except RuntimeError as error:
            if self.pulse is None or not is_broken_line(error):
                raise
            raise self.pulse.why() from None


@contextmanager
def join(device: str, timeout: float) -> Generator[World]:
    """Join the ranks that torchrun started; alone, a world of one."""
    world = world_asked_for()
    if world.size == 1:
        yield world
        return
    store, pulse = meet(world.rank, world.size, timeout)
    world = dataclasses.replace(world, pulse=pulse)
    pulse.start()
    try:
        with world.naming_the_lost():
            world = dataclasses.replace(world, patient=connect(world, store, device, timeout))
        yield world
        world.wait_for_all()
        pulse.is_over = True
    except (Interrupted, RankError):  # which all ranks know of
        raise
    except Exception as error:
        pulse.tell(error)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        pulse.is_over = True  # after an error not before, for NCCL may wait in vain here too


def connect(world: World, store: Store, device: str, timeout: float) -> Any:
    """Every rank with every other; returned is the group for waits without an end."""
    if device == "cuda":
        torch.cuda.set_device(world.local_rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    later = datetime.timedelta(seconds=timeout + SECONDS_TO_END)  # the pulse, which knows the name, comes first
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=later)
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def world_asked_for() -> World:
    """The ranks as torchrun has it, before they have met; alone, a world of one."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE") or 1) == 1:
        return World()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return World(rank, size, int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def is_broken_line(error: RuntimeError) -> bool:
    """Whether another rank cannot be reached: what gloo and NCCL raise then."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def num_cores() -> int:
    """Cores that this process may use: in a container fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parallelize(model: nn.Module, world: World, strategy: str, device: str) -> nn.Module:
    """The network as it is called in training: as it is, replicated on every rank, or shared out among them."""
    if world.size == 1:
        return model
    if strategy == "ddp":
        ids = [world.local_rank] if device == "cuda" else None
        with warnings.catch_warnings():  # what shall replace broadcast_buffers is not in torch 2.10
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True)
    assert isinstance(model, Transformer)  # its layers are called one by one
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
    words = (*words, "could not create a primitive")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(word in str(error) for word in words)
