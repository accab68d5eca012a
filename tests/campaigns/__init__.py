"""Campaigns: many runs with random failures, whose results must be those of undisturbed runs."""
