"""Runs `dag.test()` of one DAG: `python run_dag_test.py DAG_FOLDER DAG_ID CONF ASSUMED`; see test_dag_test.py."""

from __future__ import annotations

import json
import sys

from airflow.dag_processing.bundles.manager import DagBundlesManager
from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db


def main() -> None:
    """Print the states of the run's tasks as the last line."""
    folder, dag_id, conf, assumed = sys.argv[1:]
    bag = DagBag(folder)
    if bag.import_errors:
        sys.exit("\n".join(bag.import_errors.values()))
    DagBundlesManager().sync_bundles_to_db()
    sync_bag_to_db(bag, "dags-folder", None)
    run = bag.dags[dag_id].test(run_conf=json.loads(conf), mark_success_pattern=assumed or None)
    states = {ti.task_id: str(ti.state) for ti in run.get_task_instances()}
    print(json.dumps({"run": str(run.state), **states}))  # noqa: T201 -- what the test reads


if __name__ == "__main__":
    main()
