"""Transports between device memories, and the CUDA runtime below them."""
