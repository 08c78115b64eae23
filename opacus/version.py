"""The version: the Opacus release whose interface is followed, then this project's own."""

__version__ = "1.6.0+multidevice.0"
