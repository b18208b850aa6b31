// The tables, and the parts that their cells are made of.

import { el, lazy } from "./dom.js";
import { age, clock, duration, known, metric, NOTHING, number, percent } from "./format.js";
import { pageUrl, taskUrl } from "./urls.js";

/**
 * A table that becomes a list of cards on a phone; its roles are said, as a changed `display` would lose them.
 *
 * `columns`: pairs of a heading and a function from an item to its cell. The first is each row's heading.
 */
export function table({ caption, columns, items, key, empty }) {
  const headings = columns.map(([heading]) => el("th", { scope: "col", role: "columnheader" }, heading));
  const names = columns.map(([heading]) => heading).join();
  const row = (item) => {
    const [first, ...others] = columns.map(([heading, cell]) => [heading, cell(item)]);
    return el(
      "tr",
      { role: "row", "data-key": key?.(item) },
      el("th", { scope: "row", role: "rowheader" }, first[1]),
      others.map(([heading, cell]) =>
        el("td", { role: "cell", "data-label": heading, class: cell === NOTHING && "none" }, el("div", null, cell)),
      ),
    );
  };
  const rows = items.map((item) => (key ? lazy("tr", key(item), names + JSON.stringify(item), () => row(item)) : row(item)));
  if (!items.length) return el("p", { class: "quiet" }, empty);
  return el(
    "div",
    { class: "wide", role: "region", tabindex: 0, "aria-label": caption },
    el(
      "table",
      { role: "table" },
      el("caption", { class: "hidden" }, caption),
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, headings)),
      el("tbody", { role: "rowgroup" }, rows),
    ),
  );
}

const SIGNS = { running: "●", pending: "◌", suspended: "❚❚", succeeded: "✓", failed: "✕", stopped: "■" };

/** A state in a word, with a sign, so that no one needs its colour. */
export function badge(state) {
  if (!state) return el("span", { class: "quiet" }, "started by hand");
  const sign = el("span", { "aria-hidden": "true" }, SIGNS[state] ?? "○");
  return el("span", { class: `badge ${state in SIGNS ? state : "other"}` }, sign, ` ${state}`);
}

export function stateOf(job) {
  return [badge(job.state), job.trouble && el("div", { class: "note" }, troubleOf(job))];
}

/** What is wrong with a job, without the state that stands before it. */
export function troubleOf({ state, trouble }) {
  return trouble.startsWith(`${state}: `) ? trouble.slice(state.length + 2) : trouble;
}

export function jobLink(name) {
  return el("a", { href: pageUrl({ job: name }) }, name);
}

export function poolLink(name) {
  return el("a", { href: pageUrl({ pool: name }) }, name);
}

/** A link to the task that has started it; null if none has, or if it may not be read. */
export function taskLink(job) {
  const url = taskUrl(job);
  if (!url) return null;
  return el("a", { href: url, "data-airflow": true, class: "task" }, `${job.dag_id} · ${job.task_id}`);
}

/** Running of wanted instances, their bounds, and what the policy wants to change. */
export function sizeOf(job) {
  if (!known(job.running)) return NOTHING;
  const bounds = job.bounds && ` (${job.bounds.min}–${job.bounds.max})`;
  const changes = known(job.target) && job.target !== job.wanted && el("div", { class: "note" }, `→ ${job.target} planned`);
  const wants = job.running === job.wanted || ["succeeded", "failed", "stopped"].includes(job.state) ? null : ` of ${job.wanted} wanted`;
  return [`${job.running}${wants ?? ""}`, el("span", { class: "quiet" }, bounds), changes];
}

/** What the next traffic window changes for a job or pool, in words; null where none is known. */
export function nextOf({ wanted, next }) {
  if (!next) return null;
  return [next.target === wanted ? `stays at ${wanted}` : `${number(wanted)} → ${next.target} instance${next.target === 1 ? "" : "s"}`, ` from ${clock(next.at)}`];
}

/** How far a job is, with a bar; its steps where their number is unknown. */
export function progressOf(job) {
  if (!job.progress) return NOTHING;
  if (!known(job.share)) return `step ${number(job.progress.step)}`;
  const bar = { max: 1, value: job.share, "aria-label": `Progress of ${job.name}` };
  return [el("progress", bar), el("div", null, percent(job.share))];
}

export function timeLeft(job) {
  if (!["running", "pending"].includes(job.state)) return NOTHING;
  return duration(job.progress?.time_left_s);
}

export function checkpointOf(job) {
  return job.checkpoint ? [age(job.checkpoint.at), el("div", { class: "quiet" }, `step ${number(job.checkpoint.step)}`)] : NOTHING;
}

export function resizeOf(job) {
  const { resize } = job;
  if (!resize) return NOTHING;
  const pause = known(resize.pause_s) ? `paused ${duration(resize.pause_s, true)}` : "";
  const sizes = resize.before === resize.after ? `restarted with ${resize.after}` : `${resize.before} → ${resize.after}`;
  return [`${sizes}, `, age(resize.at), pause && el("div", { class: "quiet" }, pause)];
}

/** The jobs. */
export function jobsTable(jobs, caption, empty) {
  const columns = [
    ["Job", (job) => [jobLink(job.name), el("div", null, taskLink(job))]],
    ["State", stateOf],
    ["Instances", sizeOf],
    ["Progress", progressOf],
    ["Time left", timeLeft],
    ["Samples/s", (job) => number(job.state === "running" ? job.progress?.samples_per_s : null)],
    ["Loss", (job) => metric(job.progress?.loss)],
    ["Checkpoint", checkpointOf],
    ["Last resize", resizeOf],
    ["Limit", (job) => el("div", { class: "text" }, job.limit || NOTHING)],
  ];
  return table({ caption, columns, items: jobs, key: ({ name }) => name, empty });
}

/** The pools. */
export function poolsTable(pools) {
  const columns = [
    ["Pool", (pool) => [poolLink(pool.name), el("div", null, taskLink(pool))]],
    ["State", stateOf],
    ["Instances", sizeOf],
    ["Teachers", (pool) => [number(pool.teachers), quarantined(pool)]],
    ["Busy", (pool) => percent(pool.busy)],
    ["Students", (pool) => [number(pool.students), el("div", null, pool.jobs.map((name) => el("div", null, jobLink(name))))]],
    ["Students wait", (pool) => percent(pool.waiting)],
    ["Limit", (pool) => el("div", { class: "text" }, pool.limit || NOTHING)],
  ];
  const empty = "There is no teacher pool.";
  return table({ caption: "Teacher pools", columns, items: pools, key: ({ name }) => name, empty });
}

function quarantined(pool) {
  const count = pool.members.filter(({ quarantine }) => quarantine).length;
  return count ? el("div", { class: "warning" }, `${count} in quarantine`) : null;
}

/** A pool's teachers; each with a button where the user may drain it. */
export function teachersTable(pool) {
  const columns = [
    ["Teacher", ({ address }) => address],
    ["Busy", ({ busy, address }) => load(busy, address)],
    ["Answered", ({ answered }) => number(answered)],
    ["Weight", ({ weight }) => number(weight)],
    ["State", ({ quarantine }) => (quarantine ? el("span", { class: "warning" }, `quarantine: ${quarantine}`) : "answers")],
    ...(pool.can?.drain ? [["Action", ({ id, address }) => teacherButton("drain", id, address)]] : []),
  ];
  const empty = "No teacher is registered.";
  return table({ caption: `Teachers of ${pool.name}`, columns, items: pool.members, key: ({ id }) => id, empty });
}

/** The servers that were drained and still run, each with a button where the user may undo that. */
export function drainedTable(pool, ids) {
  const columns = [["Server", (id) => id], ...(pool.can?.drain ? [["Action", (id) => teacherButton("undrain", id, id)]] : [])];
  return table({ caption: `Drained servers of ${pool.name}`, columns, items: ids, key: (id) => id, empty: "" });
}

function teacherButton(action, id, address) {
  const label = action === "drain" ? "Drain" : "Undo the drain of";
  const attributes = { type: "button", "data-action": action, "data-teacher": id, "aria-label": `${label} teacher ${address}` };
  return el("button", attributes, action === "drain" ? "Drain …" : "Undo …");
}

function load(busy, address) {
  if (!known(busy)) return NOTHING;
  const bar = { min: 0, max: 1, value: busy, "aria-label": `Load of ${address}` };
  return [el("meter", bar), el("div", null, percent(busy))];
}

/** A job's instances. Columns that are empty for all are left out. */
export function instancesTable(name, instances) {
  const optional = (heading, field, cell = (one) => one[field]) =>
    instances.some((one) => known(one[field]) && one[field] !== "" && one[field] !== 0) ? [[heading, cell]] : [];
  const columns = [
    ["Instance", ({ index }) => el("a", { href: "#log", "data-instance": index }, `${index}`)],
    ["State", (one) => [badge(one.phase), el("span", { class: "quiet" }, one.given_up ? " given up" : one.leaving ? " leaving" : "")]],
    ...optional("Rank", "rank", ({ rank }) => (known(rank) ? `${rank}` : NOTHING)),
    ["Since", ({ phase, started_at: at }) => (["running", "pending"].includes(phase) ? age(at, "", "") : NOTHING)],
    ["Restarts", ({ restarts }) => `${restarts}`],
    ...optional("Ended by the cluster", "disruptions"),
    ...optional("Exit status", "exit_code", ({ exit_code: code }) => (known(code) ? `${code}` : NOTHING)),
    ...optional("Pod", "pod"),
    ...optional("Node", "node"),
    ...optional("Reason", "reason"),
  ];
  const empty = "There is no instance.";
  return table({ caption: `Instances of ${name}`, columns, items: instances, key: ({ index }) => `${index}`, empty });
}

/** What the policy has decided for each job and pool. `refused`: why a job could not be resized, by name. */
export function targetsTable(targets, refused = {}) {
  const columns = [
    ["Name", ({ name, kind }) => [kind === "pool" ? poolLink(name) : jobLink(name), kind === "pool" ? " (pool)" : ""]],
    ["Has", ({ instances }) => number(instances)],
    ["Gets", ({ instances, target }) => `${target > instances ? "↑ " : target < instances ? "↓ " : ""}${target}`],
    ["Why", ({ name, reason }) => el("div", { class: "text" }, refused[name] || reason)],
  ];
  const empty = "There is nothing that can be resized.";
  return table({ caption: "What the policy decides", columns, items: targets, key: ({ name }) => name, empty });
}

/** What has happened, newest first. */
export function eventsTable(caption, events) {
  const columns = [
    ["Time", ({ at }) => clock(at)],
    ["What", ({ kind }) => kind],
    ["Of", ({ job, instance, generation }) => job ?? eventSource(instance, generation)],
    ["Details", ({ text }) => el("div", { class: "text" }, text)],
  ];
  return table({ caption, columns, items: [...events].reverse(), empty: "Nothing has happened yet." });
}

function eventSource(instance, generation) {
  if (known(instance)) return `instance ${instance}`;
  return generation ? `generation ${generation}` : NOTHING;
}

/** A heading with its section. */
export function section(title, ...content) {
  return el("section", { "data-key": title }, el("h2", null, title), content);
}

/** Pairs of a name and a value, without those that are null. */
export function facts(pairs) {
  const given = pairs.filter(([, value]) => known(value));
  return el("dl", { class: "facts" }, given.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))));
}
