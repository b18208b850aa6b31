// Asks the API again and again: gently, and not in a hidden tab.

import { setClock } from "./format.js";

const SLOWEST_MS = 60_000;
const TIMEOUT_MS = 30_000;

/** An answer of the API that is not a success: `status`, and its own words. */
export class ApiError extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

/** Fetch, with an ApiError of status 0 where there is no answer. */
export async function ask(url, options) {
  try {
    return await fetch(url, options);
  } catch {
    throw new ApiError(0, "Airflow does not answer.");
  }
}

/** Return the JSON of an answer. Throws ApiError with what the API says. */
export async function answerOf(response) {
  const text = await response.text();
  let answer = null;
  try {
    answer = JSON.parse(text);
  } catch {
    // An error page of a proxy, as a rule
  }
  if (response.ok && answer) return answer;
  const said = answer?.error ?? answer?.detail;
  throw new ApiError(response.status, typeof said === "string" ? said : `Airflow answered with status ${response.status}.`);
}

/**
 * Reads one URL until `stop`, each `everyMs` after the last answer; after failures twice as long each time.
 *
 * - `url`: a function, as a URL may have a cursor.
 * - `changed(answer)`: called with each new answer; not when the API says that nothing has changed (304).
 * - `read(at)`: called with the time of the data of each answer that tells it, also if nothing has changed.
 * - `failed(error)`: called with each failure, and with null once the API answers again.
 */
export class Poll {
  #stopped = false;
  #timer = 0;
  #etag = "";
  #asked = "";
  #failures = 0;
  #request = null;

  constructor({ url, everyMs, changed, read = () => {}, failed }) {
    Object.assign(this, { url, everyMs, changed, read, failed });
    this.onVisibility = () => (document.hidden ? this.#pause() : this.now());
    document.addEventListener("visibilitychange", this.onVisibility);
    this.now();
  }

  /** Ask at once. */
  async now() {
    this.#pause();
    if (this.#stopped || document.hidden) return;
    const request = (this.#request = new AbortController());
    const timeout = setTimeout(() => request.abort(), TIMEOUT_MS);
    try {
      const { answer, etag, url } = await this.#ask(request.signal);
      if (this.#request !== request) return;
      if (this.#failures) this.failed(null);
      this.#failures = 0;
      if (answer) this.changed(answer);
      [this.#etag, this.#asked] = [etag, url]; // an answer that could not be shown is asked for again
    } catch (error) {
      if (this.#request !== request) return;
      this.#failures += 1;
      this.failed(error);
    } finally {
      clearTimeout(timeout);
    }
    if (!this.#stopped && this.#request === request) this.#timer = setTimeout(() => this.now(), this.#wait());
  }

  stop() {
    this.#stopped = true;
    this.#pause();
    document.removeEventListener("visibilitychange", this.onVisibility);
  }

  async #ask(signal) {
    const url = this.url();
    const known = this.#etag && this.#asked === url ? { "If-None-Match": this.#etag } : {};
    const response = await ask(url, { headers: known, cache: "no-store", signal });
    setClock(Date.parse(response.headers.get("Date")) / 1000);
    const at = Number(response.headers.get("X-EDL-At"));
    if (at) this.read(at);
    const etag = response.headers.get("ETag") ?? "";
    return { answer: response.status === 304 ? null : await answerOf(response), etag, url };
  }

  #wait() {
    return Math.min(SLOWEST_MS, this.everyMs * 2 ** Math.min(this.#failures, 6));
  }

  #pause() {
    clearTimeout(this.#timer);
    this.#request?.abort();
    this.#request = null;
  }
}
