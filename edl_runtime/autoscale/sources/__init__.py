"""Where it is said what the web needs: Prometheus, a Redis stream, or a CSV file."""
