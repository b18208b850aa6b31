"""The plugin's page in a real browser, with a distillation and an elastic job that a real Airflow runs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import unquote

import httpx
import pytest
from laptop.client import AirflowClient, DagRun
from playwright.sync_api import Browser, BrowserContext, Locator, Page, ViewportSize, expect
from support.airflow.shared import Airflow
from support.browser.chromium import SCREENSHOTS, SLOWEST_MS, faults_of, log_text, new_page, running_chromium
from support.network.proxy import Proxy

from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.specs import Bounds, JobSpec

pytestmark = [pytest.mark.system, pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(2400)]

CONN_ID = "edl_watched"
STUDENT, TRAINING, POOL = "watched-student", "watched-training", "watched-teachers"
ROLES = ("admin", "operator", "viewer")
BUSY = "responded with a status of 503"
"""What Chromium says of an answer for which Airflow was too busy, as when its SQLite is locked."""
DESKTOP, PHONE = ViewportSize(width=1440, height=900), ViewportSize(width=360, height=780)
LOOKS: dict[str, tuple[Literal["light", "dark"], ViewportSize]] = {
    "light": ("light", DESKTOP),
    "dark": ("dark", DESKTOP),
    "phone": ("dark", PHONE),
}

expect.set_options(timeout=SLOWEST_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium."""
    with running_chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def run(airflow: Airflow) -> Iterator[DagRun]:
    """A run of dags/watched.py whose tasks are deferred and whose jobs train."""
    (airflow.laptop.home / "watched").mkdir(exist_ok=True)
    run = airflow.begin("watched")
    airflow.wait_until(
        lambda: [task.state for task in airflow.client.tasks(run)].count("deferred") == len((STUDENT, TRAINING))
    )
    airflow.wait_until(lambda: _trains(airflow, run))
    yield run
    if airflow.client.state(run) not in ("success", "failed"):
        airflow.client.fail(run)


@pytest.fixture
def page(airflow: Airflow, browser: Browser, run: DagRun) -> Iterator[Page]:
    """An empty page of the admin, on a desk."""
    assert run
    with _context(airflow, browser, "admin") as context:
        page = new_page(context)
        yield page
        log_text(page)


def test_screen_readers_and_keyboards_can_use_all_jobs_and_pools(
    airflow: Airflow, browser: Browser, run: DagRun
) -> None:
    """As far as axe-core can tell, which the page's policy would keep from adding its styles."""
    assert run
    with _context(airflow, browser, "admin", bypass_csp=True) as context:
        page = new_page(context)
        for look in _each_look(airflow, page, ("light", "phone")):
            assert faults_of(page) == [], look


def test_jobs_and_pools_and_tasks_lead_to_each_other(airflow: Airflow, page: Page, run: DagRun) -> None:
    """From all jobs to one, to its pool, back, and to the task, within Airflow's frame and by any name of its host."""
    page.goto(_other_name(airflow))
    page.get_by_role("link", name="EDL").first.click()
    frame = page.frame_locator("iframe")
    frame.get_by_label("Connection").select_option(CONN_ID)
    frame.get_by_role("link", name=STUDENT).first.click()
    expect(frame.get_by_role("heading", name=STUDENT, level=1)).to_be_visible()
    frame.get_by_role("link", name=POOL).first.click()
    expect(frame.get_by_role("heading", name=POOL, level=1)).to_be_visible()
    expect(frame.get_by_role("table", name=f"Teachers of {POOL}").get_by_role("row")).to_have_count(2)
    frame.get_by_role("link", name="All jobs and pools").click()
    row = frame.get_by_role("row").filter(has=frame.get_by_role("link", name=TRAINING, exact=True)).first
    expect(row).to_contain_text("running")
    row.get_by_role("link", name="watched · train").click()
    page.wait_for_url(lambda url: unquote(url) == f"{_other_name(airflow)}/dags/watched/runs/{run.run_id}/tasks/train")


def test_a_task_and_a_run_have_a_tab_with_their_jobs(airflow: Airflow, page: Page, run: DagRun) -> None:
    """While the task is deferred; the tab of the task shows its job at once, in the theme that is chosen in Airflow."""
    shown_run = f"{airflow.laptop.url}/dags/watched/runs/{run.run_id}"
    page.goto(f"{shown_run}/tasks/train")
    page.locator("a[href$='/plugin/edl-task']").click()
    tab = page.frame_locator("iframe")
    _await_shown(page, tab.get_by_role("heading", name=TRAINING, level=1))
    expect(tab.get_by_role("button", name="Resize …")).to_be_visible()
    tab.get_by_text(re.compile(r"continues from step 0")).first.wait_for()
    _take_picture(page, "tab")
    page.goto(f"{shown_run}/tasks/train/details")
    expect(page.get_by_role("link", name="Trainers")).to_be_visible()
    top = {"x": 0, "y": 0, "width": DESKTOP["width"], "height": 600}
    page.screenshot(path=SCREENSHOTS / "airflow-details.png", clip=top)
    page.goto(f"{shown_run}/tasks/train/plugin/edl-task")
    page.evaluate("localStorage.setItem('theme', 'dark')")
    page.reload()
    expect(tab.locator("html")).to_have_attribute("data-theme", "dark")
    page.goto(f"{shown_run}/plugin/edl-run")
    expect(tab.get_by_role("link", name=STUDENT, exact=True).first).to_be_visible()
    expect(tab.get_by_role("link", name=TRAINING, exact=True).first).to_be_visible()
    page.goto(f"{shown_run}/tasks/rescale/plugin/edl-task")
    expect(tab.get_by_text("This task has started no job or pool of Elastic Deep Learning.")).to_be_visible()


def test_the_form_of_a_connection_has_our_fields(airflow: Airflow, page: Page) -> None:
    """They have the values of the connection, and say what they mean."""
    extra = json.dumps({"backend": "local", "namespace": "default", "work_dir": "/var/lib/edl"})
    shown = {"connection_id": "edl_form", "conn_type": "edl", "host": "127.0.0.1", "port": 6379, "extra": extra}
    airflow.client._ask("POST", "/api/v2/connections", json=shown)
    try:
        page.goto(f"{airflow.laptop.url}/connections")
        row = page.get_by_role("row").filter(has_text="edl_form")
        row.get_by_role("button", name="Edit Connection").click()
        form = page.get_by_role("dialog")
        fields = form.get_by_role("button", name="Extra Fields", exact=True)
        if fields.get_attribute("aria-expanded") == "false":
            fields.click()
        expect(form.get_by_text("Where the local backend keeps jobs and logs")).to_be_visible()
        expect(form.locator("input[value='/var/lib/edl']")).to_be_visible()
        form.screenshot(path=SCREENSHOTS / "airflow-connection.png")
    finally:
        airflow.client._http.delete("/api/v2/connections/edl_form")


def test_a_resize_that_is_clicked_is_seen_in_the_trainers_log(airflow: Airflow, page: Page) -> None:
    """By keyboard alone; what came of it stands in the dialog, the log and Airflow's audit log."""
    page.goto(_url(airflow, job=TRAINING))
    button = page.get_by_role("button", name="Resize …")
    button.focus()
    page.keyboard.press("Enter")
    size = page.get_by_role("dialog").get_by_role("spinbutton")
    expect(size).to_be_focused()
    size.fill("2")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("will have 2 instances")
    _take_picture(page, "resize")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(button).to_be_focused()
    expect(page.get_by_role("log").get_by_text(re.compile(r"as one of 2")).first).to_be_visible()
    audit = _audit(airflow, "edl.resize")
    assert audit["owner"] == "admin"
    assert "will have 2 instances" in audit["extra"]


def test_each_role_may_do_what_airflow_lets_it(airflow: Airflow, browser: Browser, run: DagRun) -> None:
    """Who may only read sees no button, and is refused by the API; nobody acts from another origin."""
    assert run
    for role in ROLES:
        with _context(airflow, browser, role) as context:
            page = new_page(context)
            page.goto(_url(airflow, job=TRAINING))
            page.get_by_role("log").wait_for()
            expect(page.get_by_role("button", name="Resize …")).to_have_count(0 if role == "viewer" else 1)
            page.goto(_url(airflow))
            page.get_by_role("heading", name="Jobs", exact=True).wait_for()
            expect(page.get_by_role("button", name="Run the policy …")).to_have_count(0 if role == "viewer" else 1)
            actions: tuple[tuple[str, dict[str, Any]], ...] = (
                ("resize", {"job": TRAINING, "instances": 2}),
                ("checkpoint", {"job": TRAINING}),
                ("policy", {"dry_run": True}),
                *((each, {"job": TRAINING}) for each in ("suspend", "resume", "stop") if role == "viewer"),
                *((each, {"pool": POOL, "teacher": "any"}) for each in ("drain", "undrain") if role == "viewer"),
            )
            for action, body in actions:
                answer = _act(airflow, context, action, body)
                assert answer.status == (403 if role == "viewer" else 200), (role, action, answer.text())
            for forged in ({"Sec-Fetch-Site": "cross-site"}, {"X-EDL-Request": ""}, {"Content-Type": "text/plain"}):
                answer = _act(airflow, context, "suspend", {"job": TRAINING}, forged)
                assert answer.status == 403, (role, forged, answer.text())
            expect(page.get_by_role("row").filter(has_text=TRAINING).first).to_contain_text("running")
    with httpx.Client(base_url=airflow.laptop.url, trust_env=False) as nobody:
        for path in ("/edl/", "/edl/static/edl.js", "/edl/api/overview", f"/edl/api/log?conn={CONN_ID}&job={TRAINING}"):
            assert nobody.get(path).status_code == 401
        assert nobody.post("/edl/api/actions/stop", json={"job": TRAINING, "conn": CONN_ID}).status_code == 401


def test_a_checkpoint_a_suspension_and_a_drain_are_clicked(airflow: Airflow, page: Page) -> None:
    """Each says what came of it; the drained teacher is replaced, and the suspended job trains on."""
    page.goto(_url(airflow, job=TRAINING))
    _confirm(page, "Checkpoint now …", "Write it", "checkpoint")
    _confirm(page, "Suspend …", "Suspend", "is being suspended")
    expect(page.locator(".head .badge")).to_contain_text("suspended")
    _confirm(page, "Resume …", "Resume", "resumes with 1 instance")
    expect(page.locator(".head .badge")).to_contain_text("running")

    page.goto(_url(airflow, pool=POOL))
    teachers = page.get_by_role("table", name=f"Teachers of {POOL}")
    teacher = teachers.get_by_role("row").nth(1)
    address = (teacher.get_by_role("rowheader").text_content() or "").strip()
    teacher.get_by_role("button", name=f"Drain teacher {address}").click()
    _press(page, "Drain", "has left")
    expect(teachers.get_by_role("rowheader", name=address, exact=True)).to_have_count(0)
    expect(teachers.get_by_role("button", name=re.compile("^Drain teacher"))).to_have_count(1)


def test_the_policy_runs_after_a_dry_run(airflow: Airflow, page: Page) -> None:
    """Its plan is shown before anything changes, and its reasons stand with the cluster."""
    page.goto(_url(airflow))
    page.get_by_role("button", name="Run the policy …").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("A dry run has changed nothing")
    _take_picture(page, "policy")
    dialog.get_by_role("button", name="Do it").click()
    expect(dialog.get_by_role("button", name="Do it")).to_have_count(0)
    expect(dialog.locator(".outcome:not(.failed)")).not_to_be_empty()
    dialog.get_by_role("button", name="Close").click()


def test_all_jobs_and_pools_are_shown_in_light_and_dark_and_on_a_phone(airflow: Airflow, page: Page) -> None:
    """Nothing is cut off, and nothing is said in the console, as when the page broke its own policy."""
    said: list[str] = []
    page.on("console", lambda message: BUSY in message.text or said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    for look in _each_look(airflow, page, ("light", "dark", "phone")):
        airflow.wait_until(lambda: page.evaluate("document.documentElement.scrollWidth <= innerWidth"))
        assert said == []
        _take_picture(page, look)


def test_hostile_lines_of_a_log_are_text(airflow: Airflow, page: Page) -> None:
    """Neither HTML nor escape codes do anything."""
    page.goto(_url(airflow, job=TRAINING))
    page.get_by_role("log").get_by_text("<img src=x onerror=document.title='hacked'> red").first.wait_for()
    assert page.title().startswith(TRAINING)


def test_the_log_is_filtered_and_downloaded(airflow: Airflow, page: Page) -> None:
    """By instance and by text; the download has the same lines."""
    page.goto(_url(airflow, job=TRAINING))
    log = page.get_by_role("log")
    log.get_by_text("continues from step").first.wait_for()
    page.get_by_label("Lines with").fill("continues FROM")
    expect(log.locator(".line").filter(has_not_text="continues from")).to_have_count(0)
    page.get_by_role("combobox", name="Instance").select_option("0")
    expect(log.locator(".line").filter(has_not_text="[0]")).to_have_count(0)
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    lines = download.value.path().read_text().splitlines()
    assert lines
    assert all("continues from" in line and line.startswith("[0]") for line in lines)


def test_an_outage_of_redis_is_said_and_its_end_seen(airflow: Airflow, page: Page, redis_proxy: Proxy) -> None:
    """The last good state stays; nobody has to reload."""
    page.goto(_url(airflow))
    page.get_by_role("link", name=TRAINING, exact=True).first.wait_for()
    redis_proxy.cut()
    try:
        expect(page.locator("#trouble .trouble").first).to_contain_text("Redis")
        expect(page.get_by_role("link", name=TRAINING, exact=True).first).to_be_visible()
        _take_picture(page, "outage")
    finally:
        redis_proxy.mend()
    expect(page.locator("#trouble .trouble")).to_have_count(0)


def test_a_backend_that_cannot_be_read_is_said_and_its_end_seen(airflow: Airflow, page: Page) -> None:
    """The last good state stays, also of a job that no task has started."""
    work = airflow.laptop.home / "apart"
    backend = LocalBackend(work)
    spec = JobSpec(name="by-hand", kind="trainer", command=("sleep", "600"), bounds=Bounds(1, 1), instances=1)
    jobs, away = work / "jobs", work / "away"
    link = page.get_by_role("link", name=spec.name, exact=True)
    _in_a_loop(backend.submit(spec, token="edl-submit-1/0", secrets={}))
    try:
        page.goto(_url(airflow, conn="edl_apart"))
        expect(page.get_by_role("row").filter(has=link)).to_contain_text("running")
        read_at = page.locator("#seen time").get_attribute("datetime") or ""
        expect(page.locator("#seen time")).not_to_have_attribute("datetime", read_at)  # though nothing has changed
        jobs.rename(away)
        jobs.symlink_to(jobs)
        expect(page.locator("#trouble .trouble").first).to_contain_text("can't be read")
        expect(link).to_be_visible()
        jobs.unlink()
        away.rename(jobs)
        expect(page.locator("#trouble .trouble")).to_have_count(0)
        expect(link).to_be_visible()
    finally:
        if away.exists():
            jobs.unlink(missing_ok=True)
            away.rename(jobs)
        _in_a_loop(backend.delete(spec.name))


def test_a_hidden_tab_asks_nothing(airflow: Airflow, page: Page) -> None:
    """It asks again as soon as it is seen."""
    page.clock.install()
    page.goto(_url(airflow))
    page.get_by_role("link", name=TRAINING, exact=True).first.wait_for()
    asked: list[str] = []
    hide = "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
    hide += " document.dispatchEvent(new Event('visibilitychange')) }"
    page.evaluate(hide, True)
    page.on("request", lambda request: asked.append(request.url))
    page.clock.fast_forward(60_000)  # the time of many polls
    with page.expect_response(re.compile("static/icon.svg")):
        page.evaluate("void fetch('static/icon.svg')")
    assert [url for url in asked if "/api/" in url] == []
    with page.expect_request(re.compile("api/overview")):
        page.evaluate(hide, False)
    with page.expect_request(re.compile("api/overview")):
        page.clock.fast_forward(60_000)


def test_a_stopped_job_vanishes_and_its_log_stays(airflow: Airflow, page: Page, run: DagRun) -> None:
    """The page says so, the task fails, and the tab still shows what there is."""
    page.goto(_url(airflow, job=TRAINING))
    _confirm(page, "Stop …", "Stop it", "is stopped")
    page.get_by_text(f"{TRAINING} has ended and was removed; its log is kept.").wait_for()
    page.get_by_role("log").get_by_text("continues from step").first.wait_for()
    (airflow.laptop.home / "watched" / "go").touch()
    airflow.wait_until(lambda: airflow.client.state(run) in ("success", "failed"))
    note = airflow.client._ask("GET", f"/api/v2/dags/{run.dag_id}/dagRuns/{run.run_id}")["note"]
    assert note.startswith("**Elastic deep learning**")
    assert "`distill`" in note
    shown_run = f"{airflow.laptop.url}/dags/watched/runs/{run.run_id}"
    tab = page.frame_locator("iframe")
    page.goto(f"{shown_run}/tasks/train/plugin/edl-task")
    tab.get_by_text(f"{TRAINING} has ended and was removed; its log is kept.").wait_for()
    tab.get_by_role("log").get_by_text("continues from step").first.wait_for()
    page.goto(f"{shown_run}/plugin/edl-run")
    tab.get_by_role("link", name=TRAINING, exact=True).wait_for()
    page.goto(_url(airflow, pool=POOL))  # as the task's link leads there
    page.get_by_text(f"{POOL} has ended and was removed; its log is kept.").wait_for()


def _await_shown(page: Page, heading: Locator) -> None:
    """Wait until a heading is shown; load the page again, as Chromium drops requests when a network device comes."""
    for _ in range(2):
        with suppress(AssertionError):
            expect(heading).to_be_visible(timeout=60_000)
            return
        page.reload()
    expect(heading).to_be_visible()


def _context(airflow: Airflow, browser: Browser, role: str, **options: Any) -> BrowserContext:
    """Return a window in which a user is logged in."""
    passwords = json.loads((airflow.laptop.airflow_home / "passwords.json").read_text())
    with AirflowClient(airflow.laptop.url, role, passwords[role]) as client:
        client.log_in()
        token = client._http.headers["Authorization"].removeprefix("Bearer ")
    context = browser.new_context(**{"viewport": DESKTOP, **options})
    urls = (airflow.laptop.url, _other_name(airflow))
    context.add_cookies([{"name": "_token", "value": token, "url": url} for url in urls])
    return context


def _each_look(airflow: Airflow, page: Page, looks: Sequence[str]) -> Iterator[str]:
    """Show each view in each of LOOKS that is named; yields the name of both."""
    for view, shown in (("jobs", {}), ("job", {"job": TRAINING}), ("pool", {"pool": POOL})):
        page.goto(_url(airflow, **shown))
        page.locator(".plot canvas").first.wait_for()
        if view == "job":
            page.get_by_text(re.compile(r"^Loss: from ")).wait_for()
            page.get_by_role("log").get_by_text("continues from step").first.wait_for()
        for look in looks:
            theme, size = LOOKS[look]
            page.emulate_media(color_scheme=theme)
            page.set_viewport_size(size)
            expect(page.locator("html")).to_have_attribute("data-theme", theme)
            yield f"{view}-{look}"


def _url(airflow: Airflow, **shown: str) -> str:
    return f"{airflow.laptop.url}/edl/?{httpx.QueryParams({'conn': CONN_ID, **shown})}"


def _other_name(airflow: Airflow) -> str:
    """Return Airflow's URL by another host name than that of its option `base_url`."""
    return airflow.laptop.url.replace("127.0.0.1", "localhost")


def _take_picture(page: Page, name: str) -> None:
    """Keep what a window shows; `make pictures` copies it to docs/images."""
    page.screenshot(path=SCREENSHOTS / f"airflow-{name}.png")


def _in_a_loop(done: Coroutine[Any, Any, Any]) -> None:
    """Wait for a coroutine in a thread, as Playwright's own loop runs in this one."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, done).result()


def _trains(airflow: Airflow, run: DagRun) -> bool:
    """Return whether both jobs have reported progress."""
    tasks = airflow.client.tasks(run)
    assert {task.state for task in tasks if task.task_id != "rescale"} == {"deferred"}, tasks
    jobs = airflow.shown("overview", conn=CONN_ID)["jobs"]
    steps = {job["name"]: job["progress"]["step"] for job in jobs if job["progress"]}
    return steps.get(STUDENT, 0) > 0 and steps.get(TRAINING, 0) > 20


def _audit(airflow: Airflow, event: str) -> dict[str, Any]:
    """Return the newest entry of Airflow's audit log about an event."""
    answer = airflow.client._ask("GET", f"/api/v2/eventLogs?event={event}&order_by=-when&limit=1")
    found: dict[str, Any] = answer["event_logs"][0]
    return found


def _act(
    airflow: Airflow, context: BrowserContext, action: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> Any:
    """Return the answer to an action, once Airflow is not too busy for one."""

    def answer() -> Any:
        found = context.request.post(
            f"{airflow.laptop.url}/edl/api/actions/{action}",
            data=json.dumps({"conn": CONN_ID, **body}),
            headers={"Content-Type": "application/json", "X-EDL-Request": "1", **(headers or {})},
            timeout=SLOWEST_MS,
        )
        return found if found.status != httpx.codes.SERVICE_UNAVAILABLE else None

    return airflow.wait_until(answer)


def _confirm(page: Page, button: str, confirm: str, outcome: str) -> None:
    """Press an action's button, confirm it, and wait for what comes of it."""
    page.get_by_role("button", name=button).click()
    _press(page, confirm, outcome)


def _press(page: Page, confirm: str, outcome: str) -> None:
    dialog: Locator = page.get_by_role("dialog")
    dialog.get_by_role("button", name=confirm, exact=True).click()
    expect(dialog.get_by_role("status")).to_contain_text(outcome)
    dialog.get_by_role("button", name="Close").click()
