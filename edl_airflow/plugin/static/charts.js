// Charts, drawn by uPlot, each with its text.

import { el } from "./dom.js";
import { known, metric, number } from "./format.js";

/* global uPlot */

const COLOURS = 8;
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];

/** The colour of the theme by its name in edl.css. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Colour and dashes of the series of a number: those with the same colour differ in their dashes. */
export function styleOf(index) {
  const dash = DASHES[Math.floor(index / COLOURS) % DASHES.length];
  return { stroke: colour(`series-${index % COLOURS}`), dash };
}

/** A chart that follows the width of its place, and the theme. `options(width)`: of uPlot, asked anew for each theme. */
export class Chart {
  #plot = null;
  #options;
  #data;

  constructor(options, data) {
    this.element = el("div", { class: "plot", "aria-hidden": "true" });
    this.#options = options;
    this.#data = data;
    new ResizeObserver(() => this.#fit()).observe(this.element);
    document.addEventListener("themechange", () => this.redraw());
  }

  /** Draw other data; `options`, where given, replace the former ones. */
  draw(data, options) {
    this.#data = data;
    if (!this.#plot) return;
    if (options) {
      this.#options = options;
      this.redraw();
    } else this.#plot.setData(data);
  }

  redraw() {
    if (!this.element.clientWidth) return;
    this.#plot?.destroy();
    this.#plot = new uPlot(this.#options(this.element.clientWidth), this.#data, this.element);
  }

  #fit() {
    const width = this.element.clientWidth;
    if (!width) return;
    if (!this.#plot) this.redraw();
    else if (this.#plot.width !== width) this.#plot.setSize({ width, height: this.#plot.height });
  }
}

/** The axes' look. */
export function axis(more = {}) {
  return {
    stroke: colour("quiet"),
    grid: { stroke: colour("grid"), width: 1 },
    ticks: { stroke: colour("grid"), width: 1 },
    font: "12px system-ui, sans-serif",
    ...more,
  };
}

/**
 * A line over the steps of a job: its figure, and `update(curve)`. `value(point)`: null where there is none.
 */
export class CurveFigure {
  #chart = null;
  #title;
  #value;
  #caption = el("figcaption");
  #place = el("div");

  constructor(title, value, series = 0) {
    [this.#title, this.#value, this.series] = [title, value, series];
    this.element = el("figure", { "data-key": title }, this.#caption, this.#place);
  }

  update(curve) {
    const points = curve.filter((point) => known(this.#value(point)));
    this.element.hidden = points.length < 2;
    if (points.length < 2) return;
    this.#caption.replaceChildren(el("bdi", null, this.#title), summary(points, this.#value));
    const data = [points.map(({ step }) => step), points.map(this.#value)];
    if (this.#chart) this.#chart.draw(data);
    else {
      this.#chart = new Chart((width) => this.#options(width), data);
      this.#place.append(this.#chart.element);
    }
  }

  #options(width) {
    return {
      width,
      height: 180,
      scales: { x: { time: false } },
      legend: { show: false },
      cursor: { y: false },
      axes: [axis({ size: 32, values: (_, splits) => splits.map((one) => number(one)) }), axis({ size: 56, values: (_, splits) => splits.map(metric) })],
      series: [{}, { label: this.#title, width: 1.5, points: { show: false }, ...styleOf(this.series) }],
    };
  }
}

/** A curve in words, which say what its line shows. */
function summary(points, value) {
  const [first, last] = [points[0], points.at(-1)];
  const values = points.map(value);
  const range = `lowest ${metric(Math.min(...values))}, highest ${metric(Math.max(...values))}`;
  const from = `from ${metric(value(first))} at step ${number(first.step)} to ${metric(value(last))} at step ${number(last.step)}`;
  return `: ${from}; ${range}`;
}
