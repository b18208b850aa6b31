"""Runs `dag.test()` of DAGs one after the other: `python run_dag_test.py FOLDER RUNS`; see test_dag_test.py."""

from __future__ import annotations

import json
import sys

from airflow.dag_processing.bundles.manager import DagBundlesManager
from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db


def main() -> None:
    """Print the states of all runs and their tasks as the last line. RUNS are [[DAG_ID, CONF, PATTERN], …]."""
    folder, runs = sys.argv[1:]
    bag = DagBag(folder)
    if bag.import_errors:
        sys.exit("\n".join(bag.import_errors.values()))
    DagBundlesManager().sync_bundles_to_db()
    sync_bag_to_db(bag, "dags-folder", None)
    states = {}
    for dag_id, conf, pattern in json.loads(runs):
        run = bag.dags[dag_id].test(run_conf=conf, mark_success_pattern=pattern or None)
        tasks = {ti.task_id: str(ti.state) for ti in run.get_task_instances()}
        states[dag_id] = {"run": str(run.state), **tasks}
    print(json.dumps(states))  # noqa: T201 -- what the test reads


if __name__ == "__main__":
    main()
