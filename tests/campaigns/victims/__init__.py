"""Models in training, for the campaign of divergence."""
