// The view of one pool of teachers.

import { actionButtons, listen, onAction } from "./actions.js";
import { el, place, show } from "./dom.js";
import { known, number, percent } from "./format.js";
import { LogView } from "./log.js";
import { watch } from "./page.js";
import { Poll } from "./poll.js";
import * as tables from "./tables.js";
import { Timeline } from "./timeline.js";
import { apiUrl, pageUrl } from "./urls.js";

const TIMELINE_MS = 30_000;
const DRAINED = "Those that the pool has started have ended, and others took their place; a server of edl register can be let in again.";

/** Fill `main` with the pool `name`, and keep it true. */
export function showPool(main, name) {
  const timeline = new Timeline();
  let log = null;
  let answer = null;
  const poll = watch({
    url: () => apiUrl("pool", { pool: name }),
    changed: (found) => {
      answer = found;
      if (found.pool.can?.log && !log) log = new LogView(name);
      log?.instances(found.instances.map(({ index }) => index));
      show(main, ...poolView(found, timeline, log));
    },
    denied: () => showRemoved(name),
  });
  new Poll({
    url: () => apiUrl("timeline", { job: name }),
    everyMs: TIMELINE_MS,
    changed: (found) => timeline.update(found),
    failed: () => {},
  });
  onAction(() => poll.now());
  listen(main, () => answer?.pool);
  main.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-instance]");
    if (link && log) log.select(Number(link.dataset.instance));
  });
}

/** Go to the view of a pool that was removed, as links to it stay: it is that of a removed job. */
async function showRemoved(name) {
  const { ok } = await fetch(apiUrl("job", { job: name }));
  if (ok) location.replace(pageUrl({ job: name }));
}

function poolView({ pool, instances, drained }, timeline, log) {
  return [
    el(
      "div",
      { class: "head", "data-key": "head" },
      el("p", null, tables.badge(pool.state), pool.trouble && ` ${tables.troubleOf(pool)}`),
      el("p", { class: "quiet" }, tables.taskLink(pool) ?? "No task has started it"),
      pool.limit && el("p", { class: "limit" }, `Limit: ${pool.limit}.`.replace(/\.\.$/, ".")),
      actionButtons(pool),
    ),
    tables.section("Numbers", tables.facts(numbers(pool))),
    tables.section("Teachers", tables.teachersTable(pool)),
    drained.length > 0 && tables.section("Drained", el("p", { class: "quiet" }, DRAINED), tables.drainedTable(pool, drained)),
    tables.section("Timeline", place(timeline.element)),
    known(pool.wanted) && tables.section("Instances", tables.instancesTable(pool.name, instances)),
    log && place(log.element),
  ];
}

function numbers(pool) {
  const jobs = pool.jobs.map((name) => el("div", null, tables.jobLink(name)));
  return [
    ["Instances", known(pool.wanted) ? tables.sizeOf(pool) : null],
    ["Why this size", pool.reason || null],
    ["Next traffic window", tables.nextOf(pool)],
    ["Teachers", known(pool.teachers) ? number(pool.teachers) : null],
    ["Busy", known(pool.busy) ? percent(pool.busy) : null],
    ["Students", known(pool.students) ? number(pool.students) : null],
    ["Students wait", known(pool.waiting) ? percent(pool.waiting) : null],
    ["Asked by", jobs.length ? jobs : null],
  ];
}
