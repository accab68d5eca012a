"""The ranks, the nodes that they run on, and how they find each other."""
