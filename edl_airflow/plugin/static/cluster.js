// The cluster: what it has, who waits for what, and what the policy has decided last.

import { el } from "./dom.js";
import { age, amount, clock, known, NOTHING } from "./format.js";
import { jobLink, section, table, targetsTable } from "./tables.js";

/** The section about the cluster. */
export function clusterSection({ cluster, can, jobs, pools }) {
  if (!cluster) return null;
  return section("Cluster", useTable(cluster.use), waiting(cluster, jobs), decision(cluster, [...jobs, ...pools], can.policy));
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

function waiting({ pending, suspended }, jobs) {
  const names = [...new Set([...pending, ...suspended])];
  if (!names.length) return el("p", null, "No job waits.");
  const reasons = new Map(jobs.map((job) => [job.name, job.trouble || job.reason]));
  const line = (name) => el("li", null, jobLink(name), `: ${reasons.get(name) || (suspended.includes(name) ? "suspended" : "not known")}`);
  return [el("h3", null, "Who waits, and for what"), el("ul", null, names.map(line))];
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
    at ? el("p", null, age(at, "Made "), windowText(window, until), why && `. ${why}`) : el("p", { class: "quiet" }, "Nothing rescales the jobs here."),
    notes.map((note) => el("p", { class: "warning" }, note)),
    at && targetsTable(targets),
    mayRun && el("button", { type: "button", "data-action": "policy" }, "Run the policy …"),
  ];
}

function windowText(window, until) {
  if (!window) return "";
  return ` in ${window === "default" ? "the time between windows" : `window ${window}`}${until ? ` until ${clock(until)}` : ""}`;
}

/** The next traffic window in words. */
export function nextText({ name, start, targets }) {
  const changes = Object.entries(targets).map(([job, count]) => `${job} gets ${count}`);
  return `Next window: ${name} at ${clock(start)}. ${changes.length ? `Then ${changes.join(", ")}.` : ""}`;
}
