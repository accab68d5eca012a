"""What Keras 3 and legacy Keras have in common; imports neither, nor a framework."""

from __future__ import annotations
