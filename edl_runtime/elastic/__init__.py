"""Elastic training: trainers join and leave a running job."""
