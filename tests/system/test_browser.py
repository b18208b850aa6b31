"""The quickstart's form in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

import pytest
from laptop.client import DagRun
from laptop.follow import follow_run
from playwright.sync_api import Page
from support.airflow.shared import Airflow
from support.browser.chromium import SCREENSHOTS, log_text, new_page, running_chromium

pytestmark = [pytest.mark.system, pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(2400)]

DAG_ID = "edl_quickstart_distill"


@pytest.fixture
def page() -> Iterator[Page]:
    """An empty page of a headless Chromium."""
    with running_chromium() as browser:
        page = new_page(browser.new_context(viewport={"width": 1440, "height": 900}))
        yield page
        log_text(page)


def test_the_trigger_form_starts_a_run_with_its_values(airflow: Airflow, page: Page) -> None:
    """A user logs in, changes the form's values, triggers a run, and sees it succeed with them."""
    laptop, client = airflow.laptop, airflow.client
    laptop.wait_for_dag(client, DAG_ID)
    client.unpause(DAG_ID)

    page.goto(f"{laptop.url}/auth/login")
    page.fill("input[name=username]", laptop.user)
    page.fill("input[name=password]", laptop.password)
    page.click("button[type=submit]")
    page.wait_for_url(lambda url: "/auth/login" not in url)
    page.goto(f"{laptop.url}/dags/{DAG_ID}")
    page.get_by_role("button", name="Trigger").first.click()
    for param, value in (("teachers_min", "2"), ("teachers_max", "2"), ("epochs", "3"), ("weight", "0.8")):
        page.fill(f"input[name=element_{param}]", value)
        page.press(f"input[name=element_{param}]", "Tab")
    page.screenshot(path=SCREENSHOTS / "form.png")
    page.get_by_role("dialog").get_by_role("button", name="Trigger", exact=True).click()
    page.wait_for_url(lambda url: "/runs/" in url)

    run = DagRun(DAG_ID, unquote(urlsplit(page.url).path.split("/runs/")[1].partition("/")[0]))
    follow_run(client, run, print, check=laptop.check, timeout_s=1500)
    page.goto(f"{laptop.url}/dags/{DAG_ID}/runs/{run.run_id}/tasks/distill")
    page.get_by_text("samples/s").first.wait_for()
    page.get_by_text("Success").first.wait_for()
    page.screenshot(path=SCREENSHOTS / "log.png")
    links = client.links(run, "distill")
    page.goto(f"{laptop.url}{links['Students']}")
    page.get_by_text("distilled, seed 0: accuracy").first.wait_for()
    page.screenshot(path=SCREENSHOTS / "student.png")
    answered = client.xcom(run, "distill")["metrics"]["answered"]
    assert sum(answered.values()) == 3 * 3 * 62 + 1  # seeds, epochs, batches; and one for the held-out digits
    assert len(answered) <= 2  # the second one may come when the student has ended
