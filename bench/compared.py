"""What `accuracy.py` compares: a configuration, what was predicted and measured of it, and all of one device."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import autoshard

KEPT = ("parameters", "optimizer", "gradients")  # what can be measured by itself
TIMED_ON = (1, 2)
NODE = 8  # processes on each node of a job of which only rank 0 is there
ALIKE, TRIES = 0.1, 3  # how much slower or faster than at its calibration a machine is the same; how often one is looked for
Links = tuple[int, int]  # processes, Mbit/s


@dataclass(frozen=True)
class Case:
    """One configuration. lone: only rank 0 of the job is there. device: the cost model's name for it."""

    model: str
    batch: int
    world: int = 1
    zero: int = 0
    codegen: str = "eager"
    optimizer: str = "adamw"
    precision: str | None = None
    mbit: int = 0
    lone: bool = False
    device: str = "cpu"

    def __str__(self) -> str:
        precision = f" {self.precision}" if self.precision else ""
        rate = f", {self.mbit} Mbit/s" if self.mbit else ""
        where = f"{'rank 0 of ' if self.lone else ''}{self.world}"
        return f"{self.model} x{self.batch}, ZeRO-{self.zero} on {where}, {self.codegen}, {self.optimizer}{precision}{rate}"

    @property
    def kind(self) -> str:
        """What torch calls such devices."""
        return "cpu" if self.device == "cpu" else "cuda"

    @property
    def timed(self) -> bool:
        """Whether its step time is compared."""
        return self.world in TIMED_ON and not self.lone

    @property
    def links(self) -> Links:
        """Whose calibration its time is predicted from."""
        return min(self.world, max(TIMED_ON)), self.mbit

    def config(self) -> autoshard.Config:
        """What the job and the plan are told. Nothing is computed again, so that a row is of the stage that it names."""
        options: dict[str, Any] = {"zero": self.zero, "codegen": self.codegen, "precision": self.precision, "recompute": "none"}
        return autoshard.Config(**options, optimizer=self.optimizer, verbose=False)


@dataclass(frozen=True)
class Compared:
    """Predicted and measured: bytes held between steps, what is saved beside them between forward and backward, bytes at the peak,
    bytes of parameters, optimizer state and gradients when the optimizer steps, seconds of a step; on CPUs those of the probes,
    the share of a step's kernels that are counted by FLOPs, and of a step that of waiting for the link (waits) and of what the link carries,
    hidden or not (busy); on GPUs bytes reserved, and those of libraries. date: of the measurement.
    plan: a digest of the one that was measured, where predictions may be made again."""

    case: Case
    predicted: dict[str, float]
    measured: dict[str, float]
    date: str
    categories: dict[str, int] = field(default_factory=dict)
    plan: str = ""

    @property
    def raw(self) -> float:
        """By how much of itself the measured step is off the predicted one, the machine's turns in it: what users will see."""
        return self.measured["step"] / self.predicted["step"] - 1

    @property
    def slower(self) -> float:
        """How many times as long as when it was calibrated the machine took just then for what the step is made of: its kernels and what
        it waits for, but no less than all that it sends; 1 where that was not asked."""
        if "probe" not in self.measured:
            return 1.0
        matmuls, memory, link = (self._turn(name) for name in ("probe", "memory probe", "link probe"))
        kernels = self.predicted["share"] * matmuls + (1 - self.predicted["share"]) * memory
        waits = self.predicted.get("waits", 0.0)
        return max((1 - waits) * kernels + waits * link, self.predicted.get("busy", 0.0) * link)

    def _turn(self, probe: str) -> float:
        return self.measured[probe] / self.predicted[probe] if probe in self.measured else 1.0

    @property
    def alike(self) -> bool:
        """Whether the machine was about as fast as when it was calibrated."""
        return abs(self.slower - 1) <= ALIKE

    def error(self, what: str) -> float:
        """By how much of itself the measured value is off the predicted one; of the step, on a machine as it was calibrated."""
        off = self.slower if what == "step" else 1.0
        return self.measured[what] / off / self.predicted[what] - 1


@dataclass(frozen=True)
class Results:
    """What was compared on one device. machine: that it is in, in words. note: what else is to be said of it."""

    machine: str
    rows: list[Compared]
    note: str = ""

    @staticmethod
    def load(file: Path) -> Results:
        """Those that `save` left."""
        known = json.loads(file.read_text())
        return Results(known["machine"], [Compared(**{**row, "case": Case(**row["case"])}) for row in known["rows"]], known.get("note", ""))

    def save(self, file: Path) -> None:
        """As JSON."""
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")
