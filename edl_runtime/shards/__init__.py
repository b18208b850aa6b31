"""Distribution of the data to instances, each sample once an epoch."""
