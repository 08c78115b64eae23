"""Tools for testing models and training code: devices that are emulated, samples that must not see each other.

Importing this installs nothing: devices are emulated when `devices_for`, `emulated_devices.install` or a fixture of
`opacus.testing.pytest_plugin` first asks for some.
"""

from opacus.testing.emulated_devices import Copy, EmulationUnsupported, count_copies
from opacus.testing.layouts import LAYOUTS, accelerators, devices_for
from opacus.testing.placement import spread
from opacus.testing.ranks import Outcome, RankError, Ranks
from opacus.testing.sample_isolation import check_sample_isolation

__all__ = [
    "LAYOUTS",
    "Copy",
    "EmulationUnsupported",
    "Outcome",
    "RankError",
    "Ranks",
    "accelerators",
    "check_sample_isolation",
    "count_copies",
    "devices_for",
    "spread",
]
