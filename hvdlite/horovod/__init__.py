"""Scripts written for Horovod run as they are: their ``import horovod...`` finds hvdlite.

::

    hvdliterun --horovod -np 4 python train.py
    mpirun -np 4 python -m hvdlite.horovod train.py
    mpirun -np 4 python -m hvdlite.horovod -m pytest test_training.py

and only then: nothing changes for a script that is started otherwise.

::

    names      Horovod's modules, and what of hvdlite answers for each
    finder     imports them
    util       helpers that other libraries import from Horovod
    data       data loaders that read ahead
    __main__   runs a script, a module or code with the finder in place
    bootstrap  a folder for PYTHONPATH, by which it reaches processes that a script starts
"""

from __future__ import annotations

from hvdlite.horovod.finder import answers, install

__all__ = ["answers", "install"]
