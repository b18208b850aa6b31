"""The controller: trainings as `TrainingJob` objects of a cluster."""
