// The timeline: instances of jobs and pools over the last day, traffic windows, measured traffic, targets ahead, marks.

import { axis, Chart, colour, styleOf } from "./charts.js";
import { el, show } from "./dom.js";
import { clock, counted, duration, known, number } from "./format.js";
import { eventsTable } from "./tables.js";

/* global uPlot */

const MOST_SERIES = 12;
const HEIGHT = 260;
const SIGNS = { resize: "▲", failure: "✕", checkpoint: "◆", ended: "■" };
const NOUNS = { ended: "ended job" };
const SPANS = { "15 min": 900, "1 h": 3600, "6 h": 6 * 3600, "24 h": 24 * 3600 };
const MINUTE_S = 60;

/** The figure, and `update(answer)` with an answer of api/timeline. */
export class Timeline {
  #answer = null;
  #series = [];
  #chart = null;
  #spanS = SPANS["24 h"];
  #isChosen = false;
  #place = el("div");
  #caption = el("figcaption");
  #readout = el("p", { class: "readout quiet" });
  #spans = el("div", { class: "spans", role: "group", "aria-label": "Time shown" });
  #legend = el("ul", { class: "legend" });
  #marks = el("details", null, el("summary", null, "As text"), el("div"));

  constructor() {
    this.element = el("figure", { class: "timeline", "data-key": "timeline" });
    this.#addSpanButtons();
    this.element.append(this.#caption, this.#spans, this.#place, this.#readout, this.#legend, this.#marks);
    document.addEventListener("themechange", () => this.#draw());
  }

  update(answer) {
    this.#answer = answer;
    this.#series = mostUsed(answer.series);
    if (!this.#isChosen) this.#choose(spanOf(answer));
    this.#draw();
  }

  #addSpanButtons() {
    for (const [label, seconds] of Object.entries(SPANS)) {
      const button = el("button", { type: "button", value: seconds }, label);
      button.addEventListener("click", () => {
        this.#isChosen = true;
        this.#choose(seconds);
        this.#draw();
      });
      this.#spans.append(button);
    }
    this.#choose(this.#spanS);
  }

  #choose(seconds) {
    this.#spanS = seconds;
    for (const one of this.#spans.children) one.setAttribute("aria-pressed", String(Number(one.value) === seconds));
  }

  #draw() {
    if (!this.#answer) return;
    const { series, marks, traffic } = this.#answer;
    this.#caption.textContent = captionOf(this.#answer, this.#series.length);
    show(this.#legend, this.#legendItems(traffic));
    show(this.#marks.lastChild, windowsList(this.#answer.windows), sizesList(series), eventsTable("Marks of the timeline", marks));
    if (!series.length) return;
    const options = (width) => this.#options(width);
    if (this.#chart) this.#chart.draw(dataOf(this.#answer, this.#series), options);
    else {
      this.#chart = new Chart(options, dataOf(this.#answer, this.#series));
      this.#place.append(this.#chart.element);
    }
  }

  #legendItems(traffic) {
    const items = this.#series.map(({ name, kind }, index) => item(name + (kind === "pool" ? " (pool)" : ""), styleOf(index)));
    if (traffic) items.push(item(`traffic (${traffic.unit})`, { stroke: colour("traffic"), dash: [] }));
    const kinds = [...new Set(this.#answer.marks.map(({ kind }) => kind))];
    return [...items, kinds.map((kind) => el("li", null, `${SIGNS[kind] ?? "•"} ${kind}`))];
  }

  #options(width) {
    const { until, ahead_until: aheadUntil, traffic } = this.#answer;
    const aheadS = Math.min(Math.max(0, (aheadUntil ?? until) - until), this.#spanS / 2);
    const ours = this.#series.flatMap((_, index) => [
      line(index, { paths: uPlot.paths.stepped({ align: 1 }) }),
      line(index, { paths: uPlot.paths.stepped({ align: 1 }), dash: [4, 4], width: 1.5 }),
    ]);
    const measured = traffic ? [{ scale: "traffic", stroke: colour("traffic"), width: 1, points: { show: false } }] : [];
    const side = traffic && axis({ scale: "traffic", side: 1, grid: { show: false }, size: 52, values: (_, splits) => splits.map(number) });
    return {
      width,
      height: HEIGHT,
      legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false } },
      scales: {
        x: { time: true, range: () => [until - this.#spanS, until + aheadS] },
        y: { range: (_, __, most) => [0, Math.max(1, (most || 0) * 1.15)] },
        traffic: { range: (_, __, most) => [0, (most || 1) * 1.1] },
      },
      axes: [axis({ values: clockTicks, space: 70, size: 32 }), axis({ size: 44, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] }), ...(side ? [side] : [])],
      series: [{}, ...ours, ...measured],
      hooks: {
        drawClear: [(plot) => drawWindows(plot, this.#answer)],
        draw: [(plot) => drawMarks(plot, this.#answer)],
        setCursor: [(plot) => this.#tell(plot)],
      },
    };
  }

  /** Say below the chart what stands at the pointer. */
  #tell(plot) {
    const { left } = plot.cursor;
    if (left === null || left < 0) return void (this.#readout.textContent = "");
    const at = plot.posToVal(left, "x");
    const sizes = this.#series.map(({ name, points, ahead }) => [name, valueAt(at > this.#answer.until ? ahead : points, at)]);
    const window = this.#answer.windows.find(({ start, end }) => start <= at && (end === null || at < end));
    const near = this.#answer.marks.filter((mark) => Math.abs(plot.valToPos(mark.at, "x") - left) < 6).slice(-3);
    this.#readout.textContent = [
      clock(at),
      ...sizes.filter(([, size]) => known(size)).map(([name, size]) => `${name} ${size}`),
      ...(window && isNamed(window.name) ? [`window ${window.name}`] : []),
      ...near.map(({ job, text }) => `${job}: ${text}`),
    ].join(" · ");
  }
}

function clockTicks(_, splits) {
  return splits.map((at) => new Date(1000 * at).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" }));
}

function line(index, more) {
  return { ...styleOf(index), width: 2, points: { show: false }, ...more };
}

function item(text, { stroke, dash }) {
  const swatch = el("span", { class: "swatch", "aria-hidden": "true" });
  swatch.style.borderTop = `3px ${dash.length ? "dashed" : "solid"} ${stroke}`;
  return el("li", { "data-key": text }, swatch, text);
}

/** The shortest span with all that was observed. */
function spanOf({ series, until }) {
  const first = Math.min(...series.flatMap(({ points }) => points.filter(([, size]) => known(size)).map(([at]) => at)));
  return Object.values(SPANS).find((seconds) => first > until - seconds - MINUTE_S) ?? SPANS["24 h"];
}

/** The series with most instances; a chart with more would show nothing. */
function mostUsed(series) {
  const size = ({ points, ahead }) => Math.max(0, ...points.map(([, count]) => count ?? 0), ...ahead.map(([, count]) => count ?? 0));
  const sized = series.map((one) => ({ one, size: size(one) }));
  const kept = new Set(sized.sort((a, b) => b.size - a.size).slice(0, MOST_SERIES).map(({ one }) => one));
  return series.filter((one) => kept.has(one));
}

/** All series with one axis of times, as uPlot wants them. */
function dataOf({ until, ahead_until: aheadUntil, traffic }, series) {
  const tables = series.flatMap(({ points, ahead }) => [held(points, until), held(ahead, aheadUntil ?? until)]);
  if (traffic) tables.push(columns(traffic.points));
  return tables.length ? uPlot.join(tables) : [[], []];
}

/** Points as columns; the last one holds until `until`. */
function held(points, until) {
  const last = points.at(-1);
  return columns(last && last[0] < until ? [...points, [until, last[1]]] : points);
}

function columns(points) {
  return [points.map(([at]) => at), points.map(([, value]) => value)];
}

function valueAt(points, at) {
  return points.findLast(([start]) => start <= at)?.[1];
}

/** Whether it is a traffic window, not the time between two. */
function isNamed(window) {
  return window !== "" && window !== "default";
}

function drawWindows(plot, { windows, until }) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textBaseline = "top";
  let freeFrom = 0;
  windows.forEach(({ name, start, end }, index) => {
    const from = Math.max(bbox.left, plot.valToPos(start, "x", true));
    const to = Math.min(bbox.left + bbox.width, end === null ? Infinity : plot.valToPos(end, "x", true));
    if (to <= from) return;
    ctx.fillStyle = colour(isNamed(name) ? "window" : index % 2 ? "between" : "surface");
    ctx.fillRect(from, bbox.top, to - from, bbox.height);
    ctx.fillStyle = colour("quiet");
    if (isNamed(name) && from >= freeFrom && to - from > 24 * devicePixelRatio) {
      ctx.fillText(name, from + 4 * devicePixelRatio, bbox.top + 4 * devicePixelRatio, to - from);
      freeFrom = from + ctx.measureText(name).width;
    }
  });
  const nowAt = plot.valToPos(until, "x", true);
  ctx.fillStyle = colour("quiet");
  ctx.fillRect(nowAt, bbox.top, devicePixelRatio, bbox.height);
  ctx.restore();
}

function drawMarks(plot, { marks }) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  ctx.textBaseline = "bottom";
  for (const { at, kind } of marks) {
    const x = plot.valToPos(at, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.fillStyle = colour(`mark-${kind}`) || colour("quiet");
    ctx.fillText(SIGNS[kind] ?? "•", x, bbox.top + bbox.height - 2 * devicePixelRatio);
  }
  ctx.restore();
}

// The same in words

export function captionOf({ series, marks }, shown) {
  if (!series.length) return "Nothing was observed within the last day.";
  const left = series.length > shown ? `, the ${shown} largest of ${series.length}` : "";
  const found = Object.keys(SIGNS).map((kind) => [kind, marks.filter((mark) => mark.kind === kind).length]);
  const counts = found.filter(([, count]) => count).map(([kind, count]) => counted(count, NOUNS[kind] ?? kind));
  const dashed = series.some(({ ahead }) => ahead.length) ? " Dashed: targets ahead." : "";
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  return `Running instances${left}${counts.length ? `, with ${counts.join(", ")}` : ""}.${dashed} Times: ${zone}.`;
}

function windowsList(windows) {
  const named = windows.filter(({ name }) => isNamed(name));
  if (!named.length) return el("p", null, "No traffic window is known.");
  const span = ({ start, end }) => `${clock(start)} to ${end === null ? "its end" : clock(end)}`;
  return el("ul", null, named.map((one) => el("li", null, `Window ${one.name}: ${span(one)}${one.allowed ? `, ${one.allowed}` : ""}`)));
}

function sizesList(series) {
  const sentence = ({ name, points, ahead, states }) => {
    const sizes = points.map(([, size]) => size).filter(known);
    const seen = sizes.length ? `${Math.min(...sizes)} to ${Math.max(...sizes)} instances, now ${points.at(-1)[1] ?? "not observed"}` : "not observed";
    const waits = states.map(([start, end, state]) => `${state} for ${duration(end - start)} from ${clock(start)}`);
    const targets = ahead.map(([at, size]) => `${size} from ${clock(at)}`);
    return `${name}: ${[seen, ...waits].join("; ")}${targets.length ? `; ahead: ${targets.join(", ")}` : ""}`;
  };
  return el("ul", null, series.map((one) => el("li", null, sentence(one))));
}
