"""Which piece of the data is whose, so that each sample counts once an epoch."""
