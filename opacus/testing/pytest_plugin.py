"""pytest fixtures that give a test several devices, real or emulated.

Enable it in the top-level ``conftest.py``::

    pytest_plugins = ["opacus.testing.pytest_plugin"]

Then::

    def test_my_model_on_two_devices(two_devices):
        first, second = two_devices

    def test_on_every_layout(layout):            # runs on one, two, four devices, and on one with the CPU
        model = spread(make_model(), layout)

    @pytest.mark.parametrize("layout", ["one", "two"], indirect=True)   # only these
    def test_on_some(layout): ...

    @pytest.mark.gpu(4)                          # needs 4 CUDA devices, 2 if no number is given
    def test_collectives(): ...

    def test_over_processes(two_ranks):          # or four_ranks: processes with a gloo group, started once a session
        two_ranks.run(a_function_at_module_level, 0.5)

    def test_replicas_of_several_devices(two_ranks_with_devices):  # or four_: each rank has four emulated devices, and no others
        ...

On a machine without CUDA devices the devices are emulated (`opacus.testing.emulated_devices`), and the emulation
stays installed for the rest of the process. Where CUDA devices are present they are used, and the emulation is not
installed; a test that wants more of them than there are is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from opacus.testing.emulated_devices import EmulationUnsupported
from opacus.testing.layouts import LAYOUTS, accelerators, devices_for
from opacus.testing.ranks import Ranks

__all__ = [
    "four_devices",
    "four_ranks",
    "four_ranks_with_devices",
    "layout",
    "pytest_configure",
    "pytest_runtest_setup",
    "two_devices",
    "two_ranks",
    "two_ranks_with_devices",
]


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, so that ``--strict-markers`` accepts it."""
    config.addinivalue_line("markers", "gpu(n=2): needs n CUDA devices; skipped where there are fewer")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked ``gpu(n)`` on a machine with fewer CUDA devices."""
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    wanted = marker.args[0] if marker.args else marker.kwargs.get("n", 2)
    present = torch.cuda.device_count()
    if present < wanted:
        pytest.skip(f"needs {wanted} CUDA devices, this machine has {present}")


@pytest.fixture
def two_devices() -> list[torch.device]:
    """Two devices of one kind: CUDA where there are two, else emulated."""
    return _devices_or_skip(2)


@pytest.fixture
def four_devices() -> list[torch.device]:
    """Four devices of one kind: CUDA where there are four, else emulated."""
    return _devices_or_skip(4)


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> list[torch.device]:
    """The devices of each layout in turn; see `opacus.testing.layouts`."""
    try:
        return devices_for(request.param)
    except EmulationUnsupported as unsupported:
        pytest.skip(str(unsupported))


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes with a gloo group."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four processes with a gloo group."""
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def two_ranks_with_devices() -> Iterator[Ranks]:
    """Two processes, each with four emulated devices that gloo serves."""
    with Ranks(2, emulated_devices=4) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks_with_devices() -> Iterator[Ranks]:
    """Four processes, each with four emulated devices that gloo serves."""
    with Ranks(4, emulated_devices=4) as ranks:
        yield ranks


def _devices_or_skip(n: int) -> list[torch.device]:
    try:
        return accelerators(n)
    except EmulationUnsupported as unsupported:
        pytest.skip(str(unsupported))
