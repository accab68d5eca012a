"""Measurements of hvdlite beside other libraries, which ``hvdlite bench`` runs.

What runs on the ranks is in ``*_ranks.py``; `hvdlite.torch.benchmark` and
`hvdlite.tensorflow.benchmark` have the models.

The guide to benchmarks says how they measure ("Trust the numbers").
"""
