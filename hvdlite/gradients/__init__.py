"""The gradients of a model on their way to the other ranks.

``exchange.py`` decides when a bucket is sent, ``plan.py`` which gradients share one. A strategy
exchanges it (``bucket.py``), and divides the sum by a `Scaling` (``base/reduction.py``).
"""
