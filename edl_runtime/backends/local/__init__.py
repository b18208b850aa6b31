"""Runs jobs as processes of this machine, each under a detached supervisor."""
