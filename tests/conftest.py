from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # or each process starts some that compile for it

import pytest
from hypothesis import settings

from autoshard.cost_model.allocator import SETTINGS
from tests.cluster import Cluster
from tests.garbage import collect_seldom
from tests.model_files import CONFIGS, MODEL

for name in SETTINGS:  # what tests say of the allocator is of its default
    os.environ.pop(name, None)
settings.register_profile("untimed", deadline=None)  # other work on a machine fails no test
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="the whole matrix (make test-all)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    kept = [i for i in items if not i.get_closest_marker("full")]  # not by keyword: that is the name of a policy too
    config.hook.pytest_deselected(items=[i for i in items if i.get_closest_marker("full")])
    items[:] = kept


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    collect_seldom()


def pytest_unconfigure() -> None:
    """Or what was frozen is told to have leaked at the end."""
    gc.unfreeze()


def _cluster(world: int) -> Iterator[Cluster]:
    cluster = Cluster(world)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def two() -> Iterator[Cluster]:
    yield from _cluster(2)


@pytest.fixture(scope="session")
def three() -> Iterator[Cluster]:
    yield from _cluster(3)


@pytest.fixture(scope="session")
def four() -> Iterator[Cluster]:
    yield from _cluster(4)


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """The cluster of the size given by an indirect parameter."""
    name = {2: "two", 3: "three", 4: "four"}[request.param]
    found: Cluster = request.getfixturevalue(name)
    return found


@pytest.fixture(scope="module")
def many_processes() -> Iterator[None]:
    """This process stands for rank 0 of those of a fake group; see rewriting.py."""
    import torch.distributed as dist

    from tests.rewriting import WORLD

    dist.init_process_group("fake", rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept between jobs, sources of kernels among it, goes to a folder of these tests alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The path of a model file."""
    path = tmp_path / "some_model.py"
    path.write_text(MODEL)
    return str(path)


@pytest.fixture
def configs(tmp_path: Path) -> dict[str, str]:
    """The folders of configs of transformers, by what they are of."""
    for name, config in CONFIGS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return {name: str(tmp_path / name) for name in CONFIGS}
