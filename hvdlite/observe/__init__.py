"""What a rank tells of itself: its timeline, its status, its failures."""
