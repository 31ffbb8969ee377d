"""Does gloo bear two collectives at once? Plain torch, nothing of autoshard: reductions and gathers of one group, started
before the last ones are waited for, as DDP with several buckets and every overlapped schedule do.

    torchrun --standalone --nproc-per-node 2 bench/gloo_race.py              # crashed in most long runs, torch 2.13
    torchrun --standalone --nproc-per-node 2 bench/gloo_race.py --apart      # one after the other: ends well
    torchrun --standalone --nproc-per-node 2 bench/gloo_race.py --threads 1  # as autoshard's groups: ends well
"""

from __future__ import annotations

import argparse
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SIZE = 32768


def _gloo(threads: int, store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    options._threads, options._timeout = threads, timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--apart", action="store_true", help="wait for each collective before the next")
    parser.add_argument("--threads", type=int, default=0, help="worker threads of the group; 0: torch's choice, 2")
    parser.add_argument("--rounds", type=int, default=40_000)
    args = parser.parse_args()
    if args.threads:
        dist.Backend.register_backend("gloo_threads", lambda *a: _gloo(args.threads, *a), devices=["cpu"])
    dist.init_process_group("gloo_threads" if args.threads else "gloo")
    world = dist.get_world_size()
    whole, rows = torch.randn(SIZE), torch.randn(SIZE // world)
    group, ops = dist.group.WORLD.group_name, torch.ops._c10d_functional
    running: list[torch.Tensor] = []
    start = time.perf_counter()
    for i in range(args.rounds):
        running.append(ops.reduce_scatter_tensor(whole, "sum", world, group))
        if args.apart:
            ops.wait_tensor(running.pop())
        ops.wait_tensor(ops.all_gather_into_tensor(rows, world, group))
        if len(running) > 2:
            ops.wait_tensor(running.pop(0))
        if dist.get_rank() == 0 and i % 5000 == 0:
            print(f"{i} rounds in {time.perf_counter() - start:.0f} s", flush=True)
    for reduced in running:
        ops.wait_tensor(reduced)
    print(f"rank {dist.get_rank()}: {args.rounds} rounds, all well", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
