"""The transport of one node's ranks, through shared memory: ``transport.py`` and its parts.

`connect` in ``transport/registry.py`` chooses it; `prepare_reduction` in ``transport/reduce.py``
adds up the arrays.
"""
