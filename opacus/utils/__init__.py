"""Helpers that stand on their own: samplers, batch splitting, tensor and module tools.

Nothing here knows about clipping, noise or accounting, and importing this package imports none of its modules.
"""
