// What all views share: the header, what is wrong now, and how old the data is.

import { el, show } from "./dom.js";
import { age, refreshAges } from "./format.js";
import { Poll } from "./poll.js";
import { here, isTab, pageUrl } from "./urls.js";

const EVERY_MS = 3_000;
const AGES_MS = 1_000;

let seenAt = 0;
let said = "";

/** Show the title with the way back. `conns`: the connections to choose from. */
export function showHeader(title, conns = []) {
  document.title = title === "Elastic Deep Learning" ? title : `${title} – Elastic Deep Learning`;
  const isHome = !here.job && !here.pool;
  const back = el("a", { href: pageUrl() }, isTab ? "All of this tab" : "All jobs and pools");
  const airflow = window.parent === window && el("a", { href: "../" }, "Airflow");
  const ways = [airflow, !isHome && back].filter(Boolean);
  show(
    document.getElementById("header"),
    ways.length > 0 && el("nav", { "aria-label": "Way back" }, ways.map((way) => ["← ", way, " "])),
    el("h1", null, title),
    conns.length > 1 && connections(conns),
    el("p", { class: "quiet", id: "seen" }, seenAt > 0 && age(seenAt, "As of ")),
  );
}

function connections(conns) {
  const options = conns.map((conn) => el("option", { value: conn, selected: conn === here.conn }, conn));
  return el("label", { class: "conn", "data-key": "conn" }, "Connection ", el("select", { id: "conn" }, options));
}

document.addEventListener("change", ({ target }) => {
  if (target.id === "conn") location.search = pageUrl({ conn: target.value });
});

/** Read the view's main resource; says when it can't be read, when its data is old, and when it is back. `denied()`: at each 403. */
export function watch({ url, changed, denied = () => {} }) {
  let problems = [];
  let failure = null;
  const tell = () => showTrouble(failure, problems);
  const poll = new Poll({
    url,
    everyMs: EVERY_MS,
    read: (at) => show(document.getElementById("seen"), age((seenAt = at), "As of ")),
    changed: (answer) => {
      if (answer.poll_s) poll.everyMs = 1000 * answer.poll_s;
      problems = answer.problems ?? [];
      changed(answer);
      tell();
    },
    failed: (error) => {
      failure = error;
      if (error?.status === 403) denied();
      tell();
    },
  });
  return poll;
}

const LOGIN = "You are no longer logged in to Airflow: log in there, and this page goes on.";

function showTrouble(failure, problems) {
  const failed = failure && (failure.status === 401 ? LOGIN : failure.message);
  const all = [...(failed ? [failed] : []), ...problems];
  const main = document.getElementById("main");
  const isNew = main.querySelector(":scope > p.quiet:only-child");
  if (failed && isNew) show(main);
  const text = all.join("\n");
  if (text === said) return;
  const isOver = said && !text;
  said = text;
  show(
    document.getElementById("trouble"),
    all.map((one) => el("p", { class: "trouble" }, one)),
    failure?.status === 404 && !isTab && here.conn && el("p", null, el("a", { href: "?" }, "Other connections")),
    all.length > 0 && main.childElementCount > 0 && el("p", { class: "note" }, "What stands below is the last that was seen."),
  );
  document.getElementById("news").textContent = isOver ? "All is read again." : "";
}

setInterval(() => document.hidden || refreshAges(), AGES_MS);
