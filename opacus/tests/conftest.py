"""Fixtures of this suite.

Imported by name: `pytest_plugins` is refused in a conftest that pytest finds only while it collects.
"""

from collections.abc import Generator
from importlib.util import find_spec

import pytest

from opacus.testing.emulated_devices import EmulationUnsupported
from opacus.testing.pytest_plugin import (
    four_devices,
    four_ranks,
    four_ranks_with_devices,
    layout,
    pytest_configure,
    pytest_runtest_setup,
    two_devices,
    two_ranks,
    two_ranks_with_devices,
)

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

# helpers that import what the extra `hf` brings: nothing to look for docstring examples in where it is missing
_NEEDS_HF = ["accelerate_cases.py", "adapter_models.py", "hf_ranks_cases.py", "hf_tiny.py", "hf_trainers.py"]
collect_ignore = [] if all(map(find_spec, ("transformers", "trl", "peft"))) else _NEEDS_HF


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep tests over several ranks on one worker (`--dist=loadgroup`): two pools at once would outnumber the cores."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if any("ranks" in name for name in getattr(item, "fixturenames", ())):
                item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skip a test that asks for more GPUs than the machine has, wherever it asks."""
    try:
        return (yield)
    except EmulationUnsupported as unsupported:
        pytest.skip(str(unsupported))
