"""Ways to distil, compared on one machine: what `edl compare` runs."""
