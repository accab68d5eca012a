"""A folder for PYTHONPATH: `sitecustomize` has scripts for torchrun run on hvdlite."""
