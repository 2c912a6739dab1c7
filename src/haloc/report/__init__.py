"""What was measured and found, for people to look at."""
