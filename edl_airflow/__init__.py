"""The Airflow provider of elastic deep learning."""
