"""What runs, what waits and why: now, and as it was."""
