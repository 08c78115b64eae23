"""Errors that name every problem at once.

A user who has three things to mend should learn of all three from one run, before anything was
changed. Checks therefore collect sentences, and raise once.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ConfigurationError", "PerSampleGradientError", "RepeatedNoiseError", "raise_if_any"]


class ConfigurationError(ValueError):
    """Training cannot start (or go on) with what was passed in; nothing was changed.

    Args:
        heading: what cannot be done, e.g. ``"make_private cannot start"``.
        problems: one sentence each: the parameter, module, rank or device, then what to do.
    """

    def __init__(self, heading: str, problems: Sequence[str]) -> None:
        self.heading = heading
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"{heading}: {count}:" + "".join(f"\n  - {problem}" for problem in self.problems))

    def __reduce__(self) -> tuple[type, tuple[str, list[str]]]:
        return type(self), (self.heading, self.problems)


class PerSampleGradientError(ConfigurationError):
    """A gradient cannot be told apart by sample, so it cannot be clipped."""


class RepeatedNoiseError(ConfigurationError):
    """The noise of a step would repeat that of an earlier one: its generator was set back."""


def raise_if_any(
    heading: str, problems: Sequence[str], error: type[ConfigurationError] = ConfigurationError
) -> None:
    """Raise one `error` that lists `problems`, if there is any.

    Raises:
        ConfigurationError: (or the class passed as `error`) when `problems` is not empty.
    """
    if problems:
        raise error(heading, problems)
