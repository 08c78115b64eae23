"""Fixtures of this suite.

Imported by name: `pytest_plugins` is refused in a conftest that pytest finds only while it collects.
"""

from opacus.testing.pytest_plugin import (
    four_devices,
    layout,
    pytest_configure,
    pytest_runtest_setup,
    two_devices,
)

__all__ = ["four_devices", "layout", "pytest_configure", "pytest_runtest_setup", "two_devices"]
