"""What runs, what is pending and why: now, and in the past."""
