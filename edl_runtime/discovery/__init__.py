"""Pools for those who may not reach Redis: an HTTP endpoint that lists them and tells students their teachers."""
