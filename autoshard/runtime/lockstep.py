"""Calls of a sharded model in lockstep: where they communicate, every process must make the same ones.

[Note: Lockstep] Collectives pair by their order alone. Where rank 0 evaluates by itself, leaves another block out than
rank 1 does (layer drop with a seed for each process, a branch on inputs) or skips the backward of a loss that is not finite, what
pairs does not belong together, and the job hangs or, worse, does not; so it does where blocks come in another order
([Note: Order before calls] in `codegen.py`). Where it leaves a step of the optimizer out, nothing else tells
that its rows have parted from the others'; so whether there was one is a part of the next call. Each process foresees which call comes
next: the one that came the last time after as many of the last one, and that after the same other one. A call that was not foreseen, and
each turn from training to evaluation and back, waits at the store until all have come to the same one. What is foreseen is learned there
alone, so all processes foresee the same: where two of them part, one at least does what was not foreseen, and is told. A
loop that goes on as before never waits.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from autoshard import torch_internals
from autoshard.errors import DisagreementError
from autoshard.runtime.meetings import Meetings

MOST = 8  # calls of one kind in a row, behind which one more is expected

UNSTEPPED = ", no step since the training call before"
BY_ALL = ("autoshard.state_dict", "load_state_dict")  # begin what is said of what a loop may call on one process by mistake
BUFFER = "forward broadcast "  # begins the line of a buffer that becomes rank 0's before the call


@dataclass(frozen=True)
class Call:
    """What one call of a compiled graph communicates, it and its backward, as text that is the same on all processes. skipped:
    whether the backward of the training call before it has not come. stepped: whether an optimizer has stepped since the training
    call before this one; of the first one, and of evaluation, that is taken for granted. order: a code of that in which the
    collectives are started; see [Note: Order before calls]."""

    training: bool
    collectives: str
    skipped: bool = False
    stepped: bool = True
    order: str = ""

    def described(self) -> str:
        """In one line."""
        lines = self.collectives.splitlines() or ["none"]
        first, last = (line.rpartition(" ")[-1] for line in (lines[0], lines[-1]))
        mode = "training" if self.training else "evaluation"
        skipped = " after a forward without backward" * self.skipped
        stepped = "" if self.stepped else UNSTEPPED
        code = hashlib.sha256(self.collectives.encode()).hexdigest()[:8]
        ordered = f" in order {self.order}" if self.order else ""
        written = [line.rpartition(" ")[-1] for line in lines if line.startswith(BUFFER)]
        changed = f" and of changed buffers ({written[0]} to {written[-1]})" if written else ""
        return f"{mode}{skipped}, with collectives {code}{ordered} of {first} to {last}{changed}{stepped}"


@dataclass(frozen=True)
class _Before:
    """What a call follows: so many times `last`, and before those another one."""

    other: Call | None
    last: Call
    times: int = 1

    def then(self, call: Call) -> _Before:
        """What the call after this one follows."""
        if call == self.last:
            return _Before(self.other, call, self.times + 1)
        return _Before(self.last, call)


class Lockstep:
    """Of one sharded model. skipped, stepped: of its next call."""

    def __init__(self, meetings: Meetings) -> None:
        self._meetings = meetings
        self._before: _Before | None = None
        self._follows: dict[_Before, Call] = {}
        self.skipped, self.stepped = False, True

    def enter(self, call: Call) -> None:
        """To be called before each call that communicates. DisagreementError if some process does not come, or comes to
        another call."""
        before, self.skipped = self._before, call.training
        self.stepped = self.stepped and not call.training
        self._before = before.then(call) if before else _Before(None, call)
        if before is None or before.last.training is not call.training:
            self._meet(call.described())
        elif self._foreseen(before) != call:
            self._meet(call.described())
            self._follows[before] = call

    def _foreseen(self, before: _Before) -> Call | None:
        """A long run goes on, unless one has ended when it was as long, as those of an accumulation do."""
        return self._follows.get(before) or self._follows.get(replace(before, times=min(before.times, MOST)))

    def for_copy(self) -> Lockstep:
        """That of a copy of the model."""
        return Lockstep(self._meetings.for_copy())

    def come(self, what: str) -> None:
        """Meets the others before something else that communicates. DisagreementError as above, and where some have stepped since the
        last training call and others have not: what is gathered now would be of before a step and of behind it."""
        self._meet(what if self.stepped else what + UNSTEPPED)

    def _meet(self, what: str) -> None:
        """As `come`; a call says itself whether there was a step."""
        try:
            self._meetings.meet(f"{what}, of a sharded model", {"its call": what})
        except DisagreementError as error:
            if any(what in str(error) for what in BY_ALL):
                raise DisagreementError(f"{error}. All processes must call it, behind the same step; one of them may write the file") from error
            raise DisagreementError(
                f"{error}. Every process must call a sharded model alike: as many batches, in the same mode, through the same "
                "blocks, each loss with its backward or none. What one process does alone goes inside `with autoshard.gathered(model)`, "
                "which all enter; layers that are left out or come in another order, at random or by a branch, must be the same on all "
                "(one seed for that choice)"
            ) from error


@dataclass(eq=False)
class _Beginning:
    """What is to be called where a backward begins. last: the number of the last one."""

    then: Callable[[], None]
    last: int = -1


@torch_internals.untraced  # once: it takes longer than all of this
def _begins(beginning: _Beginning, _: Any) -> None:
    before, beginning.last = beginning.last, torch_internals.backward_here()
    if beginning.last == -1 or beginning.last != before:
        beginning.then()


def before_backward(results: Sequence[Any], then: Callable[[], None]) -> None:
    """Calls `then` whenever a backward of what gave these results begins: once, though some may be views with functions of their own, of
    which each process may differentiate others."""
    begins = functools.partial(_begins, _Beginning(then))
    for node in {r.grad_fn for r in results if isinstance(r, Tensor) and r.grad_fn is not None}:
        node.register_prehook(begins)
