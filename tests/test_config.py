from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
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
        ("timeout", float("nan"), "timeout: nan is not legal"),
        ("timeout", float("inf"), "timeout: inf is not legal; legal: seconds, more than 0 and at most 1e+09"),
        ("arrival", True, "arrival: True is not legal"),
        ("memory_budget", float("nan"), "memory_budget: nan is out of range"),
        ("mesh", "shard=2", "mesh: 'shard=2' is not legal; legal: None, {'replicate': 2, 'shard': 4}, or a DeviceMesh"),
        ("mesh", {"shard": True}, "axis 'shard' has size True"),
        ("replicate_below", True, "replicate_below: True is not legal"),
        ("verbose", "no", "verbose: 'no' is not legal; legal: False, True"),
        ("dump_dir", 3, "dump_dir: 3 is not legal; legal: a folder"),
        ("plan", {"world": 2}, "plan: {'world': 2} is not legal; legal: None, a Plan, or a file of one"),
        ("passes", ("lower",), "passes: ('lower',) is not legal"),
        ("disable_passes", "bucket", "disable_passes: 'bucket' is not legal; legal: a tuple of names"),
        ("disable_passes", None, "disable_passes: None is not legal"),
        ("precision", MixedPrecisionPolicy(output_dtype=torch.float32), "legal: output_dtype=None"),
        ("precision", MixedPrecisionPolicy(cast_forward_inputs=False), "legal: output_dtype=None, cast_forward_inputs=True"),
        ("precision", MixedPrecisionPolicy(param_dtype=torch.int32), "precision: param_dtype=torch.int32 is not legal; legal: None, torch.float32"),
        ("precision", MixedPrecisionPolicy(reduce_dtype=torch.complex64), "precision: reduce_dtype=torch.complex64 is not legal"),
        ("plan", "nowhere.json", "plan: 'nowhere.json' cannot be read (no such file); legal: one of `autoshard plan --json`"),
        ("cluster", "nowhere.yaml", "cluster: 'nowhere.yaml' cannot be read (no such file); legal: one of `autoshard calibrate`"),
        ("memory_budget", "0.9", "legal: 1 byte or more, or a share as a float, such as 0.9"),
        ("memory_budget", True, "memory_budget: True is no amount of memory; legal: bytes"),
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


def test_a_mesh_of_some_ranks_is_refused_whatever_its_axes_are_called(many_processes: None) -> None:
    mesh = DeviceMesh("cpu", torch.arange(128), mesh_dim_names=("dp",), _init_backend=False)
    with pytest.raises(ConfigError, match=r"mesh: a DeviceMesh of the ranks \[0, 1, .* is not legal; legal: all ranks of the job, in order"):
        Config(mesh=mesh)


def test_a_mesh_of_ranks_in_another_order_is_refused(many_processes: None) -> None:
    """Its axes would be of other ranks than it says."""
    mesh = DeviceMesh("cpu", torch.arange(256).view(2, 128).t(), mesh_dim_names=("replicate", "shard"), _init_backend=False)
    with pytest.raises(ConfigError, match=r"mesh: a DeviceMesh of the ranks \[0, 128, 1, .* is not legal; legal: all ranks of the job, in order"):
        Config(mesh=mesh)
