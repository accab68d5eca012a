"""The command line: ``hvdlite``."""
