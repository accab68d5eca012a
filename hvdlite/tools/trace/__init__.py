"""The analysis of a trace: which rank waited for whom, and for how long."""
