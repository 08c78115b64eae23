"""What goes wrong between ranks, by name."""

from __future__ import annotations

from opacus.errors import ConfigurationError

__all__ = ["RankLostError", "ReplicaError"]


class ReplicaError(ConfigurationError):
    """Ranks cannot train together as they are; the same error, with all problems of all ranks, is raised on every rank."""


class RankLostError(RuntimeError):
    """Another rank has ended, or did not come in time. The model was not updated; training cannot go on with this group."""
