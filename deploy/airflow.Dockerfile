# Airflow's own image with the provider in it, for airflow-values.yaml.
#
#   pip wheel --no-deps --wheel-dir dist .
#   docker build -f deploy/airflow.Dockerfile -t airflow-edl:3.3.2 dist
#
# BASE            any image with Airflow 3.3 or newer, as your own
ARG BASE=apache/airflow:3.3.2
FROM ${BASE}

COPY edl_airflow-*.whl /tmp/
RUN pip install --no-cache-dir --disable-pip-version-check \
      "$(echo /tmp/edl_airflow-*.whl)[airflow,airflow-kubernetes,kubernetes]"
