// Numbers and times as text.

import { el } from "./dom.js";

/** What stands where nothing is known. */
export const NOTHING = "–";

export function known(value) {
  return value !== null && value !== undefined;
}

/** A share of 0 to 1, as in "38 %". */
export function percent(share, digits = 0) {
  if (!known(share)) return NOTHING;
  if (share > 0 && share < 0.001) return "< 0.1 %";
  return `${(100 * share).toFixed(share > 0 && share < 0.01 ? Math.max(1, digits) : digits)} %`;
}

export function number(value) {
  if (!known(value)) return NOTHING;
  return value.toLocaleString("en", { maximumFractionDigits: Math.abs(value) >= 100 ? 0 : 2 });
}

/** A loss or another metric: four digits that count. */
export function metric(value) {
  return known(value) ? String(Number(value.toPrecision(4))) : NOTHING;
}

/** Seconds, as in "2 h 5 min"; `exact` shows fractions below a minute. */
export function duration(seconds, exact = false) {
  if (!known(seconds)) return NOTHING;
  if (exact && seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const whole = Math.max(0, Math.round(seconds));
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return hours ? `${days} d ${hours} h` : `${days} d`;
  if (hours) return minutes ? `${hours} h ${minutes} min` : `${hours} h`;
  if (minutes) return minutes < 10 && whole % 60 ? `${minutes} min ${whole % 60} s` : `${minutes} min`;
  return `${whole} s`;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** An amount of a resource: memory and storage are bytes. */
export function amount(resource, value) {
  if (!known(value)) return NOTHING;
  if (!resource.includes("memory") && !resource.includes("storage")) return number(value);
  const unit = value > 0 ? Math.min(UNITS.length - 1, Math.floor(Math.log2(value) / 10)) : 0;
  return `${number(Number((value / 2 ** (10 * unit)).toFixed(1)))} ${UNITS[unit]}`;
}

/** The date of Unix seconds, null for those that no calendar has: jobs report what they like. */
function dateOf(at) {
  const date = new Date(1000 * (at ?? NaN));
  return Number.isNaN(date.getTime()) ? null : date;
}

/** A time of the day here, with the date unless it is today. `at`: Unix seconds. */
export function clock(at) {
  const date = dateOf(at);
  if (!date) return NOTHING;
  const time = date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday ? time : `${date.toLocaleDateString("en-CA")} ${time}`;
}

/** An element with the age of a moment, which `refreshAges` keeps true; the time itself is its title. */
export function age(at, before = "", after = " ago") {
  const date = dateOf(at);
  if (!date || !at) return NOTHING;
  const attributes = { datetime: date.toISOString(), title: clock(at), "data-at": at };
  return el("time", { ...attributes, "data-before": before, "data-after": after }, ageText(at, before, after));
}

const CLOCK_OFF_S = 2;
let ahead = 0;

/** Take the server's clock, in whole Unix seconds, as the true one. */
export function setClock(at) {
  const found = at - Date.now() / 1000;
  if (Math.abs(found - ahead) > CLOCK_OFF_S) ahead = found;
}

/** Unix seconds of the server's clock. */
export function now() {
  return Date.now() / 1000 + ahead;
}

export function refreshAges() {
  for (const one of document.querySelectorAll("time[data-at]")) {
    const text = ageText(Number(one.dataset.at), one.dataset.before, one.dataset.after);
    if (one.textContent !== text) one.textContent = text;
  }
}

function ageText(at, before, after) {
  return `${before}${duration(Math.max(0, now() - at))}${after}`;
}

/** `count` and its noun, as in "1 teacher", "2 teachers". */
export function counted(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}
