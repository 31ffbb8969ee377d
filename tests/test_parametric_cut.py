"""What is best saved at each price: corners of the hull of all choices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_model.parametric_cut import Corner, Value, corners


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Value, ...]:
    def value(at: int) -> Value:
        made_of = draw(st.sets(st.integers(0, at - 1), max_size=2)) if at else set()
        return Value(draw(st.integers(0, 20)), draw(st.integers(0, 20)), tuple(sorted(made_of)), draw(st.booleans()))

    return tuple(map(value, range(draw(st.integers(0, 6)))))


def _every(values: Sequence[Value]) -> Iterator[Corner]:
    """All choices of what is saved."""
    for saved in itertools.chain.from_iterable(itertools.combinations(range(len(values)), n) for n in range(len(values) + 1)):
        again, todo = set[int](), [i for i, value in enumerate(values) if value.read]
        while todo:
            at = todo.pop()
            if at not in saved and at not in again:
                again.add(at)
                todo.extend(values[at].made_of)
        yield Corner(frozenset(saved), sum(values[i].bytes for i in saved), sum(values[i].nanoseconds for i in again))


@given(graphs())
def test_corners_are_those_of_all_choices(values: tuple[Value, ...]) -> None:
    found, every = corners(values, 1, 64), list(_every(values))
    assert {(c.bytes, c.nanoseconds) for c in found} <= {(c.bytes, c.nanoseconds) for c in every}
    assert found[0].bytes == min(c.bytes for c in every)
    assert found[-1].nanoseconds == min(c.nanoseconds for c in every)
    for one, other in itertools.pairwise(found):
        assert one.bytes < other.bytes and one.nanoseconds > other.nanoseconds
        across, down = other.bytes - one.bytes, one.nanoseconds - other.nanoseconds
        line = down * one.bytes + across * one.nanoseconds
        assert all(down * c.bytes + across * c.nanoseconds >= line for c in every)  # nothing is below their line


@given(graphs(), st.integers(1, 40), st.integers(2, 5))
def test_of_many_corners_some_are_looked_for(values: tuple[Value, ...], gap: int, most: int) -> None:
    every, found = corners(values, 1, 64), corners(values, gap, most)
    assert set(found) <= set(every) and (found[0], found[-1]) == (every[0], every[-1]) and len(found) <= most
    if len(found) < most:
        apart = [(low, high) for low, high in itertools.pairwise(found) if high.bytes - low.bytes >= gap]
        assert not any(low.bytes < c.bytes < high.bytes for low, high in apart for c in every)


def test_what_several_values_are_made_of_is_saved_once_for_all() -> None:
    """One by one each would be dearer than all together: what they spare depends on what else is saved."""
    source = Value(bytes=10, nanoseconds=100, made_of=(), read=False)
    readers = [Value(bytes=8, nanoseconds=1, made_of=(0,), read=True)] * 3
    assert [(set(c.saved), c.bytes, c.nanoseconds) for c in corners((source, *readers), 1, 8)] == [
        (set(), 0, 103),
        ({0}, 10, 3),
        ({1, 2, 3}, 24, 0),
    ]
