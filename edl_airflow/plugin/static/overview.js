// The view of all jobs and pools: of a connection, or of the run or task in whose tab this is.

import { askPolicy, onAction } from "./actions.js";
import { clusterSection, nextText } from "./cluster.js";
import { el, place, show } from "./dom.js";
import { counted } from "./format.js";
import { showJob } from "./job.js";
import { showHeader, watch } from "./page.js";
import { Poll } from "./poll.js";
import { showPool } from "./pool.js";
import { jobLink, jobsTable, poolsTable, section } from "./tables.js";
import { Timeline } from "./timeline.js";
import { apiUrl, here, pageUrl } from "./urls.js";

const TIMELINE_MS = 30_000;
const TAB_MS = 5_000;
const MOST_ROWS = 100;
const FILTER_FROM = 12;
const NO_JOB =
  "No job is active. Jobs appear here once a task with an EdlTrainOperator or EdlDistillOperator runs, or `edl run` or `edl submit` has " +
  "started one. Those of DAGs whose tasks you may not read, and of other connections, are not shown.";
const ENDED = ["succeeded", "failed", "stopped"];

/** Fill `main` with all jobs and pools, and keep them true; a task's tab shows its one job at once. */
export function showOverview(main) {
  const timeline = new Timeline();
  const shown = { filter: "", all: false };
  let answer = null;
  let timelinePoll = null;
  const draw = () => show(main, ...(answer.scope.dag_id ? tabView : overview)(answer, timeline, shown));

  const poll = watch({
    url: () => apiUrl("overview"),
    changed: (found) => {
      answer = found;
      here.conn = found.conn;
      if (showsOne(main, found, poll)) return;
      showHeader(titleOf(found), found.conn ? found.conns : []);
      draw();
      if (!found.conn) return;
      timelinePoll ??= new Poll({
        url: () => apiUrl("timeline"),
        everyMs: TIMELINE_MS,
        changed: (history) => timeline.update(history),
        failed: () => {},
      });
    },
  });
  onAction(() => poll.now());
  main.addEventListener("input", ({ target }) => {
    if (target.id !== "filter") return;
    shown.filter = target.value.toLowerCase();
    draw();
  });
  main.addEventListener("click", ({ target }) => {
    if (target.dataset.action === "policy") askPolicy();
    if (target.id !== "all") return;
    shown.all = true;
    draw();
  });
}

/** Whether a task's tab shows its one job, or its one pool, from now on; its last one, if all were removed; until it has a job. */
function showsOne(main, { scope, jobs, pools, removed }, poll) {
  if (!scope.task_id || jobs.length > 1 || (!jobs.length && pools.length > 1)) return false;
  const name = jobs[0]?.name ?? pools[0]?.name ?? removed[0];
  if (!name) return false;
  poll.stop();
  if (!jobs.length) new Poll({ url: () => apiUrl("overview"), everyMs: TAB_MS, changed: (next) => next.jobs.length && location.reload(), failed: () => {} });
  showHeader(name);
  show(main);
  (pools.length && !jobs.length ? showPool : showJob)(main, name);
  return true;
}

function titleOf({ scope }) {
  if (scope.task_id) return `Jobs of task ${scope.task_id}`;
  return scope.dag_id ? "Jobs of this run" : "Elastic Deep Learning";
}

function tabView(answer, timeline, shown) {
  const more = [removedSection(answer.removed), otherConns(answer.other_conns)];
  if (answer.jobs.length || answer.pools.length) return [...overview({ ...answer, cluster: null }, timeline, shown), ...more];
  if (answer.removed.length) return more;
  const what = answer.scope.task_id ? "task" : "run";
  const state = answer.scope.task ? ` Its state is ${answer.scope.task}.` : "";
  return [el("p", null, `This ${what} has started no job or pool of Elastic Deep Learning.${state}`)];
}

/** The run's jobs that are no more; each has its log, still. */
function removedSection(names) {
  if (!names.length) return null;
  const text = "These have ended and were removed; their logs are kept.";
  return section("Removed jobs and pools", el("p", { class: "quiet" }, text), el("ul", null, names.map((name) => el("li", null, jobLink(name)))));
}

function otherConns(conns) {
  const links = conns.map((conn) => [" ", el("a", { href: pageUrl({ conn }) }, conn)]);
  return conns.length > 0 && el("p", { "data-key": "other-conns" }, "More jobs of this run are in connection", links, ".");
}

function overview(answer, timeline, shown) {
  const { jobs, pools, cluster } = answer;
  const matching = jobs.filter((job) => matches(job, shown.filter));
  const active = matching.filter(({ state }) => !ENDED.includes(state));
  const ended = matching.filter(({ state }) => ENDED.includes(state));
  return [
    summary(answer),
    section("Jobs", jobs.length >= FILTER_FROM && filterField(), limited(active, "Active jobs", jobs.length ? "No job is active." : NO_JOB, shown)),
    section("Teacher pools", poolsTable(pools)),
    section("Timeline", place(timeline.element)),
    cluster && clusterSection(answer),
    ended.length > 0 && section("Ended jobs", limited(ended, "Ended jobs", "", shown)),
  ];
}

function matches({ name, dag_id: dag, state }, filter) {
  return !filter || [name, dag, state].some((text) => text.toLowerCase().includes(filter));
}

function filterField() {
  const input = el("input", { id: "filter", type: "search", autocomplete: "off", spellcheck: "false" });
  return el("label", { class: "fields", "data-key": "filter" }, "Name, DAG or state ", input);
}

function limited(jobs, caption, empty, shown) {
  const some = shown.all ? jobs : jobs.slice(0, MOST_ROWS);
  const more = jobs.length - some.length;
  return [
    jobsTable(some, caption, empty),
    more > 0 && el("button", { type: "button", id: "all" }, `Show ${counted(more, "more job")}`),
  ];
}

/** The state of all in one line. */
function summary({ jobs, pools, cluster }) {
  const states = ["running", "pending", "suspended", "failed"];
  const counts = states.map((state) => [state, jobs.filter((job) => job.state === state).length]);
  const found = counts.filter(([state, count]) => count || state === "running").map(([state, count]) => `${count} ${state}`);
  return el(
    "div",
    { class: "head", "data-key": "summary" },
    el("p", null, `Jobs: ${found.join(", ")}. ${counted(pools.length, "pool")}.`),
    cluster?.next && el("p", { class: "next" }, nextText(cluster.next, [...jobs, ...pools])),
  );
}
