"""The gradients of a model on their way to the other ranks.

``exchange.py`` decides when a bucket is sent, ``plan.py`` which gradients share one; ``bucket.py``
is one bucket, whose strategy divides by a `Scaling` (``base/reduction.py``).
"""
