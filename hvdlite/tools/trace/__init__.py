"""The analysis of a trace: which rank waited for whom, and for how long.

::

    record     the events of a file of any size that the analysis needs, in compact arrays
    analysis   shares of time, the slowest rank, the worst tensors
    advice     what to set
    page       all of it as one HTML file
"""
