"""Runs jobs as pods of a Kubernetes cluster, with nothing of ours installed in it."""
