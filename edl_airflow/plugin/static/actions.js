// The actions: each asks in a dialog first, and shows what came of it.

import { el, show } from "./dom.js";
import { known } from "./format.js";
import { answerOf, ask as request } from "./poll.js";
import { targetsTable } from "./tables.js";
import { here } from "./urls.js";

/** Called after each action, to show its effect at once. */
let acted = () => {};

export function onAction(refresh) {
  acted = refresh;
}

const ACTIONS = {
  resize: {
    label: "Resize …",
    title: (job) => `Resize ${job.name}`,
    text: () => "The policy may change the size again at its next pass.",
    field: sizeField,
    button: "Resize",
  },
  checkpoint: {
    label: "Checkpoint now …",
    title: (job) => `Write a checkpoint of ${job.name}`,
    text: () => "The trainers write it after their current step, and then train on. It takes up to half a minute.",
    button: "Write it",
  },
  suspend: {
    label: "Suspend …",
    title: (job) => `Suspend ${job.name}`,
    text: () => "All of its instances end; it keeps its place, and continues from its last checkpoint once resumed.",
    button: "Suspend",
  },
  resume: {
    label: "Resume …",
    title: (job) => `Resume ${job.name}`,
    text: () => "It starts with its smallest size; the policy lets it grow.",
    button: "Resume",
  },
  stop: {
    label: "Stop …",
    title: (job) => `Stop ${job.name}`,
    text: (job) =>
      job.task_id
        ? "All of its instances end, and the task that waits for it fails. This cannot be undone."
        : "All of its instances end. This cannot be undone.",
    button: "Stop it",
    danger: true,
  },
};

const TEACHER_ACTIONS = {
  drain: {
    title: (teacher) => `Drain teacher ${teacher.address}`,
    text: () =>
      "It leaves the pool at once, answers what it has, and ends; the pool starts another in its place. " +
      "A server that was not started here runs on, and stays out of the pool until that is undone.",
    button: "Drain",
  },
  undrain: {
    title: (teacher) => `Let teacher ${teacher.address} answer again`,
    text: () => "Students send it requests again.",
    button: "Undrain",
  },
};

/** The buttons of all actions that the user may do with a job or pool; null if there is none. */
export function actionButtons(job) {
  const allowed = Object.entries(ACTIONS).filter(([name]) => job.can?.[name]);
  if (!allowed.length) return null;
  return el(
    "div",
    { class: "actions", role: "group", "aria-label": `Actions for ${job.name}` },
    allowed.map(([name, { label, danger }]) =>
      el("button", { type: "button", class: danger && "danger", "data-action": name, "data-key": name }, label),
    ),
  );
}

/** Let the buttons within `root` open their dialogs. `current`: returns the job or pool as it is now. */
export function listen(root, current) {
  root.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-action]");
    const job = current();
    if (!button || !job) return;
    const name = button.dataset.action;
    if (name in ACTIONS) ask(ACTIONS[name], name, job, { job: job.name });
    if (name in TEACHER_ACTIONS) {
      const id = button.dataset.teacher;
      const teacher = job.members.find((one) => one.id === id) ?? { id, address: id };
      ask(TEACHER_ACTIONS[name], name, teacher, { pool: job.name, teacher: teacher.id });
    }
  });
}

function ask({ title, text, field, button, danger }, name, target, body) {
  const input = field?.(target);
  openDialog(title(target), async (parts) => {
    show(parts.body, el("p", null, text(target)), input);
    const confirmed = await parts.confirm(button, danger);
    if (!confirmed) return;
    const size = input?.querySelector("input");
    const more = size ? { instances: size.valueAsNumber } : {};
    await parts.during(async () => {
      const answer = await post(name, { ...body, ...more });
      show(parts.outcome, answer.done);
    });
  });
}

/** Run the policy: first dry, and what that has shown after a second confirmation. */
export function askPolicy() {
  openDialog("Run the policy", async (parts) => {
    let found = null;
    await parts.during(async () => {
      found = await post("policy", { dry_run: true });
      show(parts.body, el("p", null, "A dry run has changed nothing. This is what the policy would do now:"), planOf(found.plan));
      show(parts.outcome, found.done);
    });
    if (!found || !(await parts.confirm("Do it"))) return;
    await parts.during(async () => {
      const answer = await post("policy", { dry_run: false });
      show(parts.body, planOf(answer.plan));
      show(parts.outcome, answer.done);
    });
  });
}

function planOf(plan) {
  if (!plan) return null;
  return el(
    "div",
    null,
    el("p", null, [plan.window && `Window ${plan.window}. `, plan.why]),
    plan.notes.map((note) => el("p", { class: "warning" }, note)),
    targetsTable(plan.targets, plan.refused ?? {}),
  );
}

function sizeField(job) {
  const { min = 0, max = null } = job.bounds ?? {};
  const limits = job.bounds ? ` (${min} to ${max})` : "";
  const attributes = { type: "number", required: true, step: 1, min, max, value: known(job.wanted) ? job.wanted : min };
  return el("label", { class: "field" }, `Instances${limits} `, el("input", { ...attributes, name: "instances" }));
}

async function post(name, body) {
  const response = await request(`api/actions/${name}`, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-EDL-Request": "1" },
    body: JSON.stringify({ conn: here.conn, ...body }),
  });
  return answerOf(response);
}

/**
 * Open a dialog and let `run` fill it; it stays until the user closes it.
 *
 * `run` gets `body` and `outcome`, elements to fill; `confirm(label)`, whether the user has pressed that button; and
 * `during(work)`, which waits for `work` and shows its error.
 */
function openDialog(title, run) {
  const body = el("div");
  const outcome = el("p", { class: "outcome", role: "status" });
  const close = el("button", { type: "button" }, "Close");
  const buttons = el("div", { class: "buttons" }, close);
  const form = el("form", { method: "dialog" }, body, outcome, buttons);
  const dialog = el("dialog", { "aria-labelledby": "dialog-title" }, el("h2", { id: "dialog-title" }, title), form);
  close.addEventListener("click", () => dialog.close());
  const closed = new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  closed.then(() => dialog.remove());
  form.addEventListener("submit", (event) => event.preventDefault());

  const confirm = (label, danger) => {
    const button = el("button", { type: "submit", class: danger ? "danger" : "primary" }, label);
    buttons.prepend(button);
    (form.querySelector("input") ?? button).focus();
    const pressed = new Promise((resolve) => form.addEventListener("submit", () => resolve(true), { once: true }));
    return Promise.race([pressed, closed.then(() => false)]).finally(() => button.remove());
  };

  const during = async (work) => {
    outcome.classList.remove("failed");
    show(outcome, "Waiting for the answer …");
    form.setAttribute("aria-busy", "true");
    for (const input of form.querySelectorAll("input")) input.disabled = true;
    try {
      await work();
      acted();
    } catch (error) {
      outcome.classList.add("failed");
      show(outcome, error.message);
    } finally {
      form.removeAttribute("aria-busy");
      close.focus();
    }
  };

  document.body.append(dialog);
  dialog.showModal();
  run({ body, outcome, confirm, during });
}
