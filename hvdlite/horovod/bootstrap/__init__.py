"""A folder for PYTHONPATH: ``import horovod`` finds the module in it, and that finds hvdlite."""
