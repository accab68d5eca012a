"""Errors, settings, arrays, reductions: all rooms use them, and they know nothing of ranks."""
