"""Schedules for the noise multiplier and for the clipping norm, stepped like learning-rate schedulers."""

from opacus.schedulers.grad_clip_scheduler import ExponentialGradClip, LambdaGradClip, StepGradClip
from opacus.schedulers.noise_scheduler import ExponentialNoise, LambdaNoise, StepNoise

__all__ = [
    "ExponentialGradClip",
    "ExponentialNoise",
    "LambdaGradClip",
    "LambdaNoise",
    "StepGradClip",
    "StepNoise",
]
