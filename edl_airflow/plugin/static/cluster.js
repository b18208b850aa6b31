// The cluster: what it has, who waits for what, and what the policy has decided last.

import { el } from "./dom.js";
import { age, amount, clock, known, NOTHING } from "./format.js";
import { jobLink, poolLink, section, table, targetsTable } from "./tables.js";

/** The section about the cluster. */
export function clusterSection({ cluster, can, jobs, pools }) {
  if (!cluster) return null;
  return section("Cluster", useTable(cluster.use), waiting(cluster, jobs, pools), decision(cluster, [...jobs, ...pools], can.policy));
}

function useTable(use) {
  const columns = [
    ["Resource", ([name]) => name],
    ["In use", ([name, one]) => [meter(name, one), el("div", null, `${amount(name, one.reserved)} of ${amount(name, one.total)}`)]],
    ["Ours", ([name, { ours }]) => amount(name, ours)],
    ["Training may use", ([name, { allowed }]) => (known(allowed) ? amount(name, allowed) : NOTHING)],
  ];
  const empty = "The nodes are not known here.";
  return table({ caption: "Use of the cluster", columns, items: Object.entries(use).filter(([, { total }]) => total), key: ([name]) => name, empty });
}

function meter(name, { reserved, total }) {
  return total ? el("meter", { min: 0, max: total, value: reserved, "aria-label": `Use of ${name}` }) : null;
}

function waiting({ pending, suspended }, jobs, pools) {
  const waitingPools = pools.filter(({ state }) => ["pending", "suspended"].includes(state));
  const names = [...new Set([...pending, ...suspended])];
  if (!names.length && !waitingPools.length) return el("p", null, "No job or pool waits.");
  const byName = new Map(jobs.map((job) => [job.name, job]));
  const why = ({ reason, trouble, state } = {}) => reason || trouble || state || "not known";
  return [
    el("h3", null, "Who waits, and for what"),
    el("ul", null, [
      names.map((name) => el("li", null, jobLink(name), `: ${why(byName.get(name))}`)),
      waitingPools.map((pool) => el("li", null, poolLink(pool.name), ` (pool): ${why(pool)}`)),
    ]),
  ];
}

function decision({ planned_at: at, window, until, why, notes }, jobs, mayRun) {
  const planned = jobs.filter(({ target, state }) => known(target) && !["succeeded", "failed"].includes(state));
  const targets = planned.map((job) => ({
    ...job,
    kind: job.members ? "pool" : job.kind,
    instances: job.wanted,
  }));
  return [
    el("h3", null, "The policy's last decision"),
    at ? el("p", null, age(at, "Made "), windowText(window, until), why && `. ${why}`) : el("p", { class: "quiet" }, "Nothing rescales the jobs here: unpause a DAG with an EdlAutoscaleOperator, such as edl_rescale_by_traffic."),
    notes.map((note) => el("p", { class: "warning" }, note)),
    at && targetsTable(targets),
    mayRun && el("button", { type: "button", "data-action": "policy" }, "Run the policy …"),
  ];
}

function windowText(window, until) {
  if (!window) return "";
  return ` in ${nameOf(window)}${until ? ` until ${clock(until)}` : ""}`;
}

function nameOf(window) {
  return window === "default" ? "the time between windows" : `window ${window}`;
}

const MOST_CHANGES = 5;

/** The next traffic window in words: whose size it changes. */
export function nextText({ name, start, targets }, jobs) {
  const changed = jobs.filter((job) => known(targets[job.name]) && targets[job.name] !== job.wanted);
  const changes = changed.slice(0, MOST_CHANGES).map((job) => `${job.name} goes from ${job.wanted} to ${targets[job.name]}`);
  if (changed.length > MOST_CHANGES) changes.push(`${changed.length - MOST_CHANGES} more change`);
  return `Next, at ${clock(start)}: ${nameOf(name)}. ${changes.length ? `Then ${changes.join(", ")}.` : "No size changes then."}`;
}
