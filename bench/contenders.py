"""The systems that are compared: each function makes the reference model train by one of them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import reference
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

MESSAGE = 1 << 20  # bytes, of what is sent beside a step
RANK = 4  # of the matrices that PowerSGD sends
CALIBRATED = "BENCH_CLUSTER"  # in the environment: the file of what the machines were measured to be


class Contender(NamedTuple):
    """A model that trains. step: one whole training step on some tokens; returns its loss."""

    model: nn.Module
    optimizer: Optimizer
    step: Callable[[Tensor], Tensor]


def _optimizer(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=reference.LEARNING_RATE)


def _ordinary(model: nn.Module, optimizer: Optimizer | None = None) -> Contender:
    """The training loop that everyone writes."""
    optimizer = optimizer or _optimizer(model)

    def step(tokens: Tensor) -> Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), reference.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Contender(model, optimizer, step)


def compute() -> Contender:
    """Every process by itself: what a step costs without communication. Trains something else."""
    return _ordinary(torch.compile(reference.build_model()))


def compute_beside(stage: Literal[0, 1, 2, 3]) -> Contender:
    """The same while the link carries as many bytes as each process sends by autoshard's plan of this stage, from the step's begin, with
    nothing waiting for anything but the step's end. Processes send to the next one and receive from the one before."""
    sent = _bytes_sent(stage)
    sizes = [min(MESSAGE, sent - at) for at in range(0, sent, MESSAGE)]
    given, taken = ([torch.zeros(size, dtype=torch.uint8) for size in sizes] for _ in range(2))
    world, rank = dist.get_world_size(), dist.get_rank()
    alone = compute()

    def step(tokens: Tensor) -> Tensor:
        works = [dist.irecv(message, (rank - 1) % world) for message in taken]
        works += [dist.isend(message, (rank + 1) % world) for message in given]
        loss = alone.step(tokens)
        for work in works:
            assert work is not None, "this process is in the group of all"
            work.wait()
        return loss

    return alone._replace(step=step)


def _bytes_sent(stage: Literal[0, 1, 2, 3]) -> int:
    import autoshard

    cluster = autoshard.Cluster.from_yaml(f"nodes: {dist.get_world_size()}\ndevice: cpu")
    tokens = reference.batch(0, 0)
    plan = autoshard.plan(reference.build_model(), {"input_ids": tokens, "labels": tokens}, autoshard.Config(zero=stage), cluster)
    return sum(traffic.bytes for traffic in plan.predicted.traffic)


def ddp(compiled: bool = False) -> Contender:
    """DistributedDataParallel at its defaults."""
    model = DistributedDataParallel(reference.build_model())
    optimizer = _optimizer(model)
    return _ordinary(torch.compile(model) if compiled else model, optimizer)


def ddp_hooked(hook: Literal["fp16", "powersgd"]) -> Contender:
    """DistributedDataParallel with one of torch's communication hooks; PowerSGD from the second step on, which is the earliest."""
    found = ddp()
    model: Any = found.model
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        options = {"matrix_approximation_rank": RANK, "start_powerSGD_iter": 2}
        model.register_comm_hook(powerSGD_hook.PowerSGDState(None, **options), powerSGD_hook.powerSGD_hook)
    return found


def fsdp2(compiled: bool = False) -> Contender:
    """fully_shard on each decoder block and on the rest, at its defaults; blocks compiled one by one."""
    model: Any = reference.build_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = reference.CHOSEN.blocks(model)
    for i, block in enumerate(blocks):
        if compiled:
            blocks[i] = torch.compile(block)
        fully_shard(blocks[i], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _ordinary(model)


def deepspeed_zero(stage: int) -> Contender:
    """DeepSpeed's engine on its CPU accelerator."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Hosts here share a memory, which DeepSpeed would use in place of the links if it thought them one host.
    os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])
    import deepspeed

    model = reference.build_model()
    config = {
        "train_micro_batch_size_per_gpu": reference.BATCH,
        "gradient_clipping": reference.CLIP,
        # The default bucket of 5e8 elements alone takes 2 GB; this is the 25 MB of DDP.
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 6_250_000},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(model), config=config)

    def step(tokens: Tensor) -> Tensor:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Contender(engine, optimizer, step)


def autoshard_zero(stage: Literal[0, 1, 2, 3, "auto"], **more: Any) -> Contender:
    """This project, with the stage given or decided, and what else a Config says."""
    import autoshard

    model = reference.build_model()
    backend = autoshard.backend(autoshard.Config(zero=stage, verbose=False, **more))
    return _ordinary(torch.compile(model, backend=backend))


CONTENDERS: dict[str, Callable[[], Contender]] = {
    "compute": compute,
    "ddp": ddp,
    "ddp_compiled": partial(ddp, compiled=True),
    "fsdp2": fsdp2,
    "fsdp2_compiled": partial(fsdp2, compiled=True),
    "deepspeed_zero1": partial(deepspeed_zero, 1),
    "deepspeed_zero2": partial(deepspeed_zero, 2),
    "deepspeed_zero3": partial(deepspeed_zero, 3),
    "autoshard0": partial(autoshard_zero, 0),
    "autoshard1": partial(autoshard_zero, 1),
    "autoshard2": partial(autoshard_zero, 2),
    "autoshard3": partial(autoshard_zero, 3),
    "autoshard_auto": partial(autoshard_zero, "auto"),
}

# Where machines were calibrated (see stages.py).
MEASURED: dict[str, Callable[[], Contender]] = {
    "autoshard_calibrated": lambda: autoshard_zero("auto", cluster=os.environ[CALIBRATED]),
}

# Where hosts have several processes.
HIERARCHIES: dict[str, Callable[[], Contender]] = {
    f"autoshard{stage}_{hierarchy}": partial(autoshard_zero, stage, hierarchy=hierarchy)
    for stage, hierarchies in ((2, ("flat", "two_level")), (3, ("flat", "two_level", "hpz")))
    for hierarchy in hierarchies
}


# Where gathers start when the optimizer has stepped.
EARLY: dict[str, Callable[[], Contender]] = {
    f"autoshard{stage}_early": partial(autoshard_zero, stage, early_gathers=True) for stage in (1, 3)
}

# Where memory is what stage 3 takes with all that torch saves (see one_budget.py).
BUDGETED: dict[str, Callable[[], Contender]] = {
    f"autoshard3_{how}": partial(autoshard_zero, 3, memory_budget=79_800_000, recompute=how) for how in ("none", "auto")
}

# Where memory has no room for all that is saved, of a model whose weights are made of factors (see partition_activations.py).
PARTED: dict[str, Callable[[], Contender]] = {
    "autoshard0": partial(autoshard_zero, 0),
    "autoshard0_parts": partial(autoshard_zero, 0, memory_budget=76_000_000, recompute="none", partition_activations=True),
    "autoshard0_again": partial(autoshard_zero, 0, memory_budget=76_000_000),
    "autoshard0_either": partial(autoshard_zero, 0, memory_budget=76_000_000, partition_activations=True),
}

# Where gradients are compressed.
COMPRESSIONS: dict[str, Callable[[], Contender]] = {
    "ddp_fp16": partial(ddp_hooked, "fp16"),
    "ddp_powersgd": partial(ddp_hooked, "powersgd"),
    "autoshard0": partial(autoshard_zero, 0),
    "autoshard0_fp16": partial(autoshard_zero, 0, compression="fp16"),
    "autoshard0_powersgd": partial(autoshard_zero, 0, compression="powersgd", compression_rank=RANK),
}

# Where a link carries something beside compute (see beside.py).
BESIDE: dict[str, Callable[[], Contender]] = {f"compute_beside{stage}": partial(compute_beside, stage) for stage in (0, 3)}

POSSIBLE = CONTENDERS | MEASURED | BESIDE | HIERARCHIES | EARLY | BUDGETED | PARTED | COMPRESSIONS


def side_of(name: str) -> str:
    """The project whose a contender is: what shares a process."""
    return next((side for side in ("autoshard", "deepspeed") if name.startswith(side)), "torch")


def why_absent(name: str) -> str:
    """Why a contender cannot be run here; "" if it can."""
    if name.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    return ""
