"""Reports of a rank on itself: its timeline, its status, its failures."""
