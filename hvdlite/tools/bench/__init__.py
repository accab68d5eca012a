"""Measurements of hvdlite beside other libraries, which ``hvdlite bench`` runs.

What runs on the ranks is in ``*_ranks.py``; `hvdlite.torch.benchmark` and
`hvdlite.tensorflow.benchmark` have the models.

All contenders live in the same processes and take turns in an order that changes. Before each turn
all ranks sleep until the last has arrived and then leave a barrier together; the time of a turn is
that of the slowest rank; every rank computes with one thread. The result of a contender is checked
before it is timed. Spreads are the 10th and 90th percentile of the rounds. A ratio is the median of
the ratios within each round, which other work on the machine hardly touches.
"""
