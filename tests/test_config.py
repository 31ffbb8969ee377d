from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import Config
from autoshard.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("zero", 4, "zero: 4 is not legal; legal: 'auto', 0, 1, 2, 3"),
        ("zero", True, "zero: True is not legal"),
        ("codegen", "inductr", "did you mean 'inductor'?"),
        ("optimizer", "adamW", "did you mean 'adamw'?"),
        ("precision", "bf17", "did you mean 'bf16'?"),
        ("buffers", "rank0", "legal: 'broadcast', 'local'"),
        ("memory_budget", "72 Gigs", "'72 Gigs' is no amount of memory"),
        ("memory_budget", 1.5, "a float a share in (0, 1]"),
        ("memory_budget", -3, "out of range"),
        ("memory_budget", True, "no amount of memory"),
        ("mesh", {"shards": 2}, "did you mean 'shard'?"),
        ("mesh", {"shard": 0}, "axis 'shard' has size 0"),
        ("replicate_below", -1, "replicate_below: -1"),
        ("timeout", 0, "timeout: 0 is not legal"),
        ("disable_passes", ("buckt",), "did you mean 'bucket'?"),
        ("passes", "merge_unshards", "requires names; put name_parameters before it"),
        ("passes", "name_parameters,buckets", "'buckets' is no pass"),
    ],
)
def test_impossible_values_name_field_value_and_the_legal_form(field: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError) as raised:
        Config(**{field: value})
    assert says in str(raised.value)


def test_unknown_names_get_the_nearest_legal_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'memory_budget'"):
        Config.from_options({"memory_buget": "1GB"})


def test_defaults_are_legal_and_frozen() -> None:
    config = Config()
    assert config.zero == "auto"
    with pytest.raises(AttributeError):
        config.zero = 3  # type: ignore[misc]


def test_precision_becomes_dtypes() -> None:
    assert Config().dtypes() == (None, None)
    assert Config(precision="bf16").dtypes() == (torch.bfloat16, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.bfloat16)
    assert Config(precision=policy).dtypes() == (torch.float16, torch.bfloat16)


def test_mesh_axes_are_outermost_first() -> None:
    assert Config(mesh={"shard": 2, "replicate": 4}).mesh_axes() == (("replicate", 4), ("shard", 2))
