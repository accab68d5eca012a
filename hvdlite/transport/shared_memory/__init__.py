"""The transport of the ranks of one node, which exchange through memory that they share."""
