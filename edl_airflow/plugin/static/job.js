// The view of one job.

import { actionButtons, listen, onAction } from "./actions.js";
import { CurveFigure } from "./charts.js";
import { el, place, show } from "./dom.js";
import { age, clock, known, metric, NOTHING, number, percent } from "./format.js";
import { LogView } from "./log.js";
import { watch } from "./page.js";
import { Poll } from "./poll.js";
import * as tables from "./tables.js";
import { Timeline } from "./timeline.js";
import { apiUrl } from "./urls.js";

const TIMELINE_MS = 30_000;
const POOL_MS = 5_000;
const METRICS = 6;

/** Fill `main` with the job `name`, and keep it true. */
export function showJob(main, name) {
  const parts = {
    timeline: new Timeline(),
    log: null,
    loss: new CurveFigure("Loss", ({ loss }) => loss),
    rate: new CurveFigure("Samples per second", ({ samples_per_s: rate }) => rate, 1),
    metrics: new Map(),
    pool: null,
  };
  let answer = null;
  let poolPoll = null;
  const draw = () => show(main, ...jobView(name, answer, parts));

  const poll = watch({
    url: () => apiUrl("job", { job: name }),
    changed: (found) => {
      answer = found;
      if (found.can_log && !parts.log) parts.log = new LogView(name);
      parts.log?.instances(found.instances.map(({ index }) => index));
      drawCurves(found.curve, parts);
      const pool = found.job?.pools[0];
      if (!found.job && poolPoll) {
        poolPoll.stop();
        poolPoll = parts.pool = null;
      }
      if (pool && !poolPoll) {
        poolPoll = followPool(pool, (one) => {
          parts.pool = one;
          draw();
        });
      }
      draw();
    },
  });
  new Poll({
    url: () => apiUrl("timeline", { job: name }),
    everyMs: TIMELINE_MS,
    changed: (found) => parts.timeline.update(found),
    failed: () => {},
  });
  onAction(() => poll.now());
  listen(main, () => answer?.job);
  main.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-instance]");
    if (link && parts.log) parts.log.select(Number(link.dataset.instance));
  });
}

/** Read the teachers of the job's pool; who may not read it sees none. */
function followPool(pool, found) {
  return new Poll({
    url: () => apiUrl("pool", { pool }),
    everyMs: POOL_MS,
    changed: (answer) => found(answer.pool),
    failed: (error) => error && [403, 404].includes(error.status) && found(null),
  });
}

function drawCurves(curve, { loss, rate, metrics }) {
  loss.update(curve);
  rate.update(curve);
  const names = [...new Set(curve.flatMap((point) => Object.keys(point.metrics ?? {})))].slice(0, METRICS);
  for (const name of names) {
    if (!metrics.has(name)) metrics.set(name, new CurveFigure(name, (point) => point.metrics?.[name], 2 + metrics.size));
    metrics.get(name).update(curve);
  }
}

function jobView(name, { job, instances, events, curve, last_lines: lastLines }, parts) {
  return [
    job ? head(job) : gone(name, events),
    job && numbers(job),
    curve.length > 1 && tables.section("Curves", el("div", { class: "charts" }, figures(parts))),
    tables.section("Timeline", place(parts.timeline.element)),
    parts.pool && tables.section(`Teachers of ${parts.pool.name}`, poolLine(parts.pool), tables.teachersTable({ ...parts.pool, can: {} })),
    job && tables.section("Instances", tables.instancesTable(name, instances)),
    lastLines.length > 0 && tables.section("Last lines of the failed instance", el("pre", { class: "log short", tabindex: 0 }, lastLines.join("\n"))),
    parts.log ? place(parts.log.element) : el("p", { class: "quiet", "data-key": "log" }, "You may not read this job's log."),
    tables.section("Events", tables.eventsTable(`Events of ${name}`, events)),
  ];
}

/** What is left of a job that was removed. */
function gone(name, events) {
  const end = events.findLast(({ kind }) => kind === "ended");
  const text = `${name} has ended and was removed; its log is kept.`;
  return el("div", { class: "head", "data-key": "gone" }, el("p", { class: "quiet" }, text), end?.text && el("p", { class: "limit" }, `Its end: ${end.text}`));
}

function figures({ loss, rate, metrics }) {
  return [loss, rate, ...metrics.values()].map(({ element }) => place(element));
}

function poolLine(pool) {
  return el("p", null, tables.poolLink(pool.name), pool.limit && `: ${pool.limit}`);
}

function head(job) {
  const pools = job.pools.map((pool) => [" · asks pool ", tables.poolLink(pool)]);
  return el(
    "div",
    { class: "head", "data-key": "head" },
    el("p", null, tables.badge(job.state), job.trouble && ` ${tables.troubleOf(job)}`),
    el("p", { class: "quiet" }, tables.taskLink(job) ?? "No task has started it", pools),
    bar(job),
    job.limit && el("p", { class: "limit" }, `Limit: ${job.limit}.`.replace(/\.\.$/, ".")),
    actionButtons(job),
  );
}

function bar(job) {
  if (!known(job.share)) return null;
  const left = tables.timeLeft(job);
  const text = `${percent(job.share, 1)}${left === NOTHING ? "" : `, ${left} left`}`;
  return el("div", { class: "bar" }, el("progress", { max: 1, value: job.share, "aria-label": `Progress of ${job.name}` }), el("strong", null, text));
}

function numbers(job) {
  const { progress, checkpoint, resize } = job;
  const pairs = [
    ["Instances", tables.sizeOf(job)],
    ["Why this size", job.reason || null],
    ["Next traffic window", tables.nextOf(job)],
    ["Step", progress && `${number(progress.step)}${known(progress.total_steps) ? ` of ${number(progress.total_steps)}` : ""}`],
    ["Epoch", progress && number(progress.epoch)],
    ["Samples/s", progress && number(job.state === "running" ? progress.samples_per_s : null)],
    ["Loss", progress && known(progress.loss) ? metric(progress.loss) : null],
    ...Object.entries(progress?.metrics ?? {}).map(([metricName, value]) => [metricName, metric(value)]),
    ["Waits for batches", progress && job.pools.length ? percent(progress.waiting) : null],
    ["Last checkpoint", checkpoint && [`step ${number(checkpoint.step)}, `, age(checkpoint.at)]],
    ["Generation", job.generation ? `${job.generation}` : null],
    ["Last resize", resize && [tables.resizeOf(job), resize.reason && el("div", { class: "quiet" }, resize.reason)]],
    ["Last report", progress && age(progress.updated_at)],
    ["Note", progress?.note || null],
    ["Started", job.created_at ? [clock(job.created_at), el("span", { class: "quiet" }, " (", age(job.created_at), ")")] : null],
  ];
  return tables.section("Numbers", tables.facts(pairs));
}
