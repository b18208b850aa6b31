// Addresses: of this page's views, of the API, and of Airflow's own pages.

const OF_AIRFLOW = ["dag_id", "run_id", "task_id", "map_index"];

const asked = new URLSearchParams(location.search);

/** What this page shows: one job, one pool, or all; `scope`: the run or task of Airflow in whose tab it is. */
export const here = {
  conn: asked.get("conn") ?? "",
  job: asked.get("job") ?? "",
  pool: asked.get("pool") ?? "",
  scope: Object.fromEntries(OF_AIRFLOW.filter((name) => asked.get(name)).map((name) => [name, asked.get(name)])),
};

/** Whether this page is a tab of a run or task in Airflow. */
export const isTab = Boolean(here.scope.dag_id);

/** The address of a view: of a job, of a pool, or of all. */
export function pageUrl(target = {}) {
  return `?${new URLSearchParams({ ...here.scope, ...(here.conn && { conn: here.conn }), ...target })}`;
}

/** The address of a resource of the API. `more`: further parameters; empty ones are left out. */
export function apiUrl(path, more = {}) {
  const all = { conn: here.conn, ...here.scope, ...more };
  const given = Object.entries(all).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return `api/${path}?${new URLSearchParams(given)}`;
}

/** The page of Airflow about the task that has started a job; null if none has. */
export function taskUrl({ dag_id: dag, run_id: run, task_id: task, map_index: mapIndex }) {
  if (!dag || !run || !task) return null;
  const [dagPart, runPart, taskPart] = [dag, run, task].map(encodeURIComponent);
  const mapped = mapIndex >= 0 ? `/mapped/${mapIndex}` : "";
  return `../dags/${dagPart}/runs/${runPart}/tasks/${taskPart}${mapped}`;
}

/**
 * Let links to Airflow's own pages (`data-airflow`) work from inside its frame.
 *
 * The frame's sandbox forbids to navigate what is around it; its router takes a changed address, though.
 */
export function followAirflowLinks() {
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-airflow]");
    if (!link || window.parent === window || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    window.parent.history.pushState(null, "", link.href);
    window.parent.dispatchEvent(new PopStateEvent("popstate", { state: null }));
  });
}
