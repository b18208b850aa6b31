"""A whole Airflow on one machine, for the demo and for tests."""
