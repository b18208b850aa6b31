"""The runtime of elastic deep learning: it runs in pods and local processes and never imports Airflow."""

__version__ = "0.1.0"
