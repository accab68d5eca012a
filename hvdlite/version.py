"""The version of hvdlite."""

__version__ = "0.1.0"
