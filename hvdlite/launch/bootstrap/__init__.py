"""A folder for PYTHONPATH: scripts for Horovod or torchrun run on hvdlite, by `sitecustomize`."""
