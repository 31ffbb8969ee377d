"""Prediction: what the cost model says of a plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoshard.typed import check_types

AT_THE_STEP = "the optimizer's step"  # a place
BEHIND_A_BREAK = "what is computed and saved behind a graph break"  # among what a prediction leaves out


@dataclass(frozen=True)
class Traffic:
    """One kind of collective of a step: what, how many messages, bytes that one process sends."""

    collective: str
    phase: str
    messages: int
    bytes: int
    seconds: float

    def __post_init__(self) -> None:
        check_types(self, "plan: predicted: traffic")


@dataclass(frozen=True)
class Prediction:
    """What the cost model says of a plan, for one process and one step.

    memory: bytes by category at the moment of the peak. reserved: bytes that CUDA's caching allocator then has from the driver, at most; None
    where there is no such allocator or nothing was simulated. expandable: whether its segments expand, by the settings of where this was
    planned; expanding: bytes that are reserved where they do. place: the moment of the peak, an operation and the model's line. error: by how
    much of itself the measured peak was lower or higher than the predicted one in comparisons like this. seconds: of a step, by part: compute,
    waiting for collectives, the optimizer, what Python does for each parameter, and how much longer it takes to launch all that; none where
    they were not simulated. seconds_error, reserved_error: as error. unknown: what the model leaves out, said in every table. budget: bytes
    that the process may use; None: no limit was known. accumulating: bytes at the peak of a step whose gradients are added to those of an
    earlier one; None where it was not simulated, or memory counts these already.
    """

    memory: dict[str, int] = field(default_factory=dict)
    traffic: tuple[Traffic, ...] = ()
    unknown: tuple[str, ...] = ()
    place: str = ""
    error: tuple[float, float] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    seconds_error: tuple[float, float] | None = None
    reserved: int | None = None
    reserved_error: tuple[float, float] | None = None
    expandable: bool = False
    expanding: int | None = None
    budget: int | None = None
    accumulating: int | None = None

    def __post_init__(self) -> None:
        check_types(self, "plan: predicted")

    @property
    def peak_bytes(self) -> int:
        """The most bytes at once, of the categories that are known."""
        return sum(self.memory.values())

    @property
    def of_a_part(self) -> bool:
        """Whether only the first graph of several was looked at: a step takes at least so much."""
        return BEHIND_A_BREAK in self.unknown

    @property
    def footprint(self) -> int:
        """Bytes that the device has to have for that: what its allocator holds, fragments in it, where that is known."""
        return max(self.peak_bytes, self.reserved or 0)

    @property
    def step_seconds(self) -> float | None:
        """A whole step; None if it was not simulated."""
        return sum(self.seconds.values()) if self.seconds else None

    @property
    def communication_seconds(self) -> float:
        """Time on the wire if nothing overlaps."""
        return sum(t.seconds for t in self.traffic)
