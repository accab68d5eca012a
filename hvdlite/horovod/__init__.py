"""The alias: scripts written for Horovod run unchanged, with hvdlite as ``horovod``.

::

    hvdliterun --horovod -np 4 python train.py
    mpirun -np 4 python -m hvdlite.horovod train.py
    mpirun -np 4 python -m hvdlite.horovod -m pytest test_training.py

Scripts that are started in any other way are not affected.

::

    names      Horovod's modules, and the modules of hvdlite that provide their contents
    finder     imports them
    util       helpers that other libraries import from Horovod
    __main__   runs Python again, with metadata and the launcher's bootstrap on its PYTHONPATH, by
               which the alias reaches processes that a script starts
    metadata   a folder with the version of Horovod
"""

from __future__ import annotations

from hvdlite.horovod.finder import install

__all__ = ["install"]
