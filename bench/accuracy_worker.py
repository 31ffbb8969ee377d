"""One process of a configuration of the accuracy bench: python accuracy_worker.py CASE-AS-JSON PLAN OUT [--told].

With --told, it writes a line when the model is compiled, and measures when it reads one.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))

import contenders  # noqa: E402
import gpu_clock  # noqa: E402
import lone_rank  # noqa: E402
import worker  # noqa: E402
import zoo  # noqa: E402
from accuracy import PROBE, PROBE_LINK, PROBE_MEMORY  # noqa: E402
from compared import Case  # noqa: E402
from told import until_told  # noqa: E402

import autoshard  # noqa: E402
from autoshard.calibration.messages import IN_A_ROW, in_a_row  # noqa: E402
from autoshard.cost_model.optimizer import NAMED  # noqa: E402
from autoshard.ops.direct import GATHER_DIRECT  # noqa: E402
from autoshard.runtime import processes  # noqa: E402

WARM_UP, ROUNDS = 4, 15
BETWEEN = "between forward and backward"
looks: dict[str, int] = {}  # bytes of a GPU in the last step, while memory is measured


def contender(case: Case, plan: str) -> contenders.Contender:
    """The model and the optimizer of a case. plan: the file of what was predicted."""
    torch.manual_seed(0)
    model = zoo.MODELS[case.model][0]().train().to(case.kind)
    optimizer = NAMED[case.optimizer](list(model.parameters()))
    backend = autoshard.backend(autoshard.Config(plan=plan, codegen=case.codegen, verbose=False))
    return zoo.contender(model, optimizer, backend, mark)


def mark() -> None:
    """Where a step's forward is done: in the profiler's events, and by CUDA's caching allocator, which takes a while to say."""
    if looks:
        with torch.profiler.record_function(BETWEEN):
            looks[BETWEEN] = torch.cuda.memory_allocated()


def kept_bytes(made: contenders.Contender, step: Callable[[], object]) -> dict[str, int]:
    """Of parameters, optimizer state and gradients, on this process, when the optimizer steps."""
    found: dict[str, int] = {}

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        several = {"parameters": parameters, "optimizer": state, "gradients": [p.grad for p in parameters if p.grad is not None]}
        found.update({name: sum(_local(t).nbytes for t in tensors) for name, tensors in several.items()})

    handle = made.optimizer.register_step_pre_hook(look)
    step()
    handle.remove()
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def probes() -> Iterator[tuple[float, float, float]]:
    """Seconds of a matmul, of a sum of two tensors, over buffers larger than the caches, and of a gather, as `autoshard calibrate` takes
    them: say how fast the machine is at that moment."""
    pool = [(torch.randn(PROBE, PROBE), torch.randn(PROBE, PROBE)) for _ in range(32)]
    terms = [torch.randn(PROBE_MEMORY) for _ in range(8)]
    sums = [torch.zeros(PROBE_MEMORY) for _ in terms]
    gather = _gather()
    for (a, b), (c, d) in itertools.cycle(zip(pool, pool[1:] + pool[:1])):
        dist.barrier()
        c @ d  # a processor that slept while it waited takes a while to be as fast again
        start = time.perf_counter()
        a @ b.t(), a @ b, a.t() @ b
        between = time.perf_counter()
        for i, term in enumerate(terms):
            torch.add(sums[i - 1], term, out=sums[i])
        after = time.perf_counter()
        dist.barrier()
        meeting = time.perf_counter()
        gather()
        yield (between - start) / 3, (after - between) / len(terms), (time.perf_counter() - meeting) / IN_A_ROW


def _gather() -> Callable[[], object]:
    """Several in a row, over the job's own group."""
    if dist.get_world_size() == 1:
        return lambda: None
    mesh = processes.build_mesh("cpu", (("shard", dist.get_world_size()),))
    rows, name = torch.zeros(PROBE_LINK // dist.get_world_size()), mesh.get_group().group_name
    return lambda: in_a_row(lambda: GATHER_DIRECT(rows, dist.get_world_size(), name))


def memory_on_cpu(made: contenders.Contender, batch: Any) -> dict[str, int]:
    """Bytes held between steps, what is there beside them between forward and backward, and bytes at the peak of a step."""
    held = worker.held_bytes(made)
    looks[BETWEEN] = 0
    grown = worker.grown(made, batch, BETWEEN)
    looks.pop(BETWEEN)
    saved = [total for behind, total in grown if not behind][-1]
    return {"held": held, "saved": saved, "peak": held + max(total for _, total in grown)}


def memory_on_gpu(made: contenders.Contender, batch: Any) -> dict[str, int]:
    """The same by CUDA's caching allocator, and what it has reserved; what it had given out that is no tensor's is by itself."""
    held = worker.held_bytes(made, "cuda")
    libraries = torch.cuda.memory_allocated() - held
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    looks[BETWEEN] = 0
    for _ in range(2):
        made.step(batch)
    between = looks.pop(BETWEEN)
    most = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    saved = between - held - libraries
    return {"held": held, "saved": saved, "libraries": libraries, **{name: size - libraries for name, size in most.items()}}


def times_on_cpu(made: contenders.Contender, batch: Any) -> dict[str, float]:
    """Seconds of a step and of the probes."""
    taken = [(seconds, *probed) for seconds, probed in zip((worker._timed(made, batch)[0] for _ in range(ROUNDS)), probes())]
    found = dict(zip(("step", "probe", "memory probe", "link probe"), map(statistics.median, zip(*taken))))
    return found if dist.get_world_size() > 1 else {name: seconds for name, seconds in found.items() if name != "link probe"}


def times_on_gpu(made: contenders.Contender, batch: Any) -> dict[str, float]:
    """Seconds of a step, by the GPU's clock."""
    return {"step": statistics.median(gpu_clock.seconds_of(lambda: made.step(batch)) for _ in range(ROUNDS))}


def join(case: Case) -> None:
    """Makes this process one of the case's."""
    if case.lone:
        lone_rank.join(case.world)
    elif "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def measured(case: Case, plan: str, ready: Callable[[], object]) -> dict[str, float]:
    """What this process finds of a case, by the plan in a file. ready: called when all is compiled."""
    made = contender(case, plan)
    batch = {name: x.to(case.kind) for name, x in zoo.MODELS[case.model][1](case.batch, torch.Generator().manual_seed(dist.get_rank())).items()}
    for _ in range(WARM_UP):
        made.step(batch)
    ready()
    memory, times = (memory_on_cpu, times_on_cpu) if case.kind == "cpu" else (memory_on_gpu, times_on_gpu)
    found: dict[str, float] = {**kept_bytes(made, lambda: made.step(batch)), **memory(made, batch)}
    return {**found, **times(made, batch)} if case.timed else found


def main() -> None:
    """Measures, and writes what rank 0 found."""
    case = Case(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    join(case)
    found = measured(case, sys.argv[2], until_told if "--told" in sys.argv else lambda: None)
    if dist.get_rank() == 0:
        Path(sys.argv[3]).write_text(json.dumps(found))
    dist.barrier()
    time.sleep(worker.EXIT_SECONDS)


if __name__ == "__main__":
    main()
