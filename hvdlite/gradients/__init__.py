"""The gradients of a model on their way to the other ranks."""
