"""What all rooms use: errors, settings, arrays, reductions. It knows nothing of ranks."""
