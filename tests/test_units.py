from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import ConfigError
from autoshard.units import bytes_text, enough_text, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"), [("72GiB", 72 * 1024**3), ("80GB", 80 * 10**9), ("1.5 kib", 1536), ("123", 123), ("7B", 7), ("1e9", 10**9)]
)
def test_amounts(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_more_than_any_number_has_room_for_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="is no amount of memory"):
        parse_bytes("9" * 400)


@given(st.text(max_size=6))
def test_anything_else_is_a_config_error(text: str) -> None:
    try:
        assert parse_bytes(text) >= 0
    except ConfigError as error:
        assert repr(text) in str(error)


@given(st.integers(0, 2**50))
def test_what_is_written_is_read_back_nearly(size: int) -> None:
    assert abs(parse_bytes(bytes_text(size)) - size) <= max(1, size * 0.006)


@given(st.integers(0, 2**50))
def test_what_is_enough_is_read_back_as_no_less(size: int) -> None:
    assert 0 <= parse_bytes(enough_text(size)) - size <= max(1, size * 0.011)
