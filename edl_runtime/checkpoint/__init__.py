"""Checkpoints: what a training is carried by when its trainers come and go."""
