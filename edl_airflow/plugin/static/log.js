// A job's log: all instances merged, following, filtered, and as a download.

import { el } from "./dom.js";
import { Poll } from "./poll.js";
import { apiUrl } from "./urls.js";

const MOST_LINES = 5000;
const EVERY_MS = 2000;
const ENDED_MS = 15_000; // a next try may follow
const TYPING_MS = 300;

/** The log of the job `name`: `element`, and `instances(numbers)` to say which there are. */
export class LogView {
  #name;
  #cursor = "";
  #poll = null;
  #leftOut = 0;
  #typing = 0;
  #instance = el("select", { name: "instance" }, el("option", { value: "" }, "all"));
  #text = el("input", { type: "search", name: "text", autocomplete: "off", spellcheck: "false" });
  #follow = el("input", { type: "checkbox", name: "follow", checked: true });
  #download = el("a", { class: "button", download: true }, "Download");
  #note = el("p", { class: "quiet" });
  #lines = el("pre", { class: "log", tabindex: 0, role: "log", "aria-live": "off", "aria-label": "Log lines" });

  constructor(name) {
    this.#name = name;
    const labelled = (text, field) => el("label", null, `${text} `, field);
    const fields = [labelled("Instance", this.#instance), labelled("Lines with", this.#text), labelled("Follow", this.#follow)];
    this.element = el("section", { id: "log", "data-key": "log", "aria-label": "Log" });
    this.element.append(el("h2", null, "Log"), el("div", { class: "fields" }, fields, this.#download), this.#note, this.#lines);
    this.#instance.addEventListener("change", () => this.#restart());
    this.#text.addEventListener("input", () => {
      clearTimeout(this.#typing);
      this.#typing = setTimeout(() => this.#restart(), TYPING_MS);
    });
    this.#follow.addEventListener("change", () => (this.#follow.checked ? this.#read() : this.#poll.stop()));
    this.#restart();
  }

  /** Offer these instances in the filter. */
  instances(numbers) {
    const offered = new Set([...this.#instance.options].map(({ value }) => value));
    const missing = numbers.map(String).filter((one) => !offered.has(one));
    this.#instance.append(...missing.map((one) => el("option", { value: one }, one)));
  }

  /** Show one instance's lines. */
  select(instance) {
    this.instances([instance]);
    this.#instance.value = String(instance);
    this.#restart();
    this.#instance.focus();
  }

  #filter() {
    return { job: this.#name, instance: this.#instance.value, text: this.#text.value };
  }

  #restart() {
    this.#cursor = "";
    this.#download.href = apiUrl("log/download", this.#filter());
    this.#read();
  }

  #read() {
    this.#poll?.stop();
    this.#poll = new Poll({
      url: () => apiUrl("log", { ...this.#filter(), cursor: this.#cursor }),
      everyMs: EVERY_MS,
      changed: (answer) => this.#add(answer),
      failed: (error) => (this.#note.textContent = error ? `The log can't be read now: ${error.message}` : ""),
    });
  }

  #add({ lines, cursor, left_out: leftOut, reset, ended }) {
    const isFirst = reset || !this.#cursor;
    const atEnd = this.#lines.scrollHeight - this.#lines.scrollTop - this.#lines.clientHeight < 40;
    if (isFirst) this.#lines.replaceChildren();
    this.#leftOut = isFirst ? leftOut : this.#leftOut + leftOut;
    this.#cursor = cursor;
    this.#lines.append(...lines.map(({ instance, text }) => lineOf(instance, text)));
    while (this.#lines.childElementCount > MOST_LINES) {
      this.#lines.firstElementChild.remove();
      this.#leftOut += 1;
    }
    if (atEnd || isFirst) this.#lines.scrollTop = this.#lines.scrollHeight;
    this.#note.textContent = this.#noteText(ended);
    this.#poll.everyMs = ended ? ENDED_MS : EVERY_MS;
    if (!this.#follow.checked) this.#poll.stop();
  }

  #noteText(ended) {
    if (!this.#lines.childElementCount) return this.#text.value ? "No line has this text." : "There is no output yet.";
    const left = this.#leftOut ? `${this.#leftOut} earlier lines are only in the download. ` : "";
    return `${left}${ended ? "The log has ended." : ""}`;
  }
}

function lineOf(instance, text) {
  return el("span", { class: "line" }, el("span", { class: `who who-${instance % 8}` }, `[${instance}] `), `${text}\n`);
}
