"""Measurements of hvdlite beside other libraries, which ``hvdlite bench`` runs.

::

    job              the job that measures: a function on every rank
    report           the facts of the machine; sizes, times and tables as text
    workloads        the models of the training benchmark

On the ranks::

    measurement      contenders take turns, round by round; medians, spreads, ratios within a round
    allreduce_ranks  sums of one array, and of many at once
    training_ranks   training steps; `hvdlite.torch.benchmark` and `hvdlite.tensorflow.benchmark`
                     have the models
    compression_ranks
                     exchanges of a model's gradients, also for `hvdlite.advise`

All contenders live in the same processes and take turns in an order that changes. Before each turn
all ranks sleep until the last has arrived and then leave a barrier together; the time of a turn is
that of the slowest rank; every rank computes with one thread. The result of a contender is checked
before it is timed. Spreads are the 10th and 90th percentile of the rounds. A ratio is the median of
the ratios within each round, which other work on the machine hardly touches.
"""
