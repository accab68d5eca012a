"""Virtual ranks: the same bits for any number of processes."""
