"""Autoscaling: the policy, traffic windows, and the rescaling pass."""
