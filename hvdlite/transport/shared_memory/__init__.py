"""The transport of one node's ranks, through shared memory: ``transport.py`` and its parts."""
