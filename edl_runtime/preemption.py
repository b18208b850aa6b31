"""Notices that a cloud is about to take this machine away, as its metadata server gives them.

- AWS: `spot/instance-action`, 404 until there is one, then JSON; with the token of a session (IMDSv2).
  https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
- Google Cloud: `instance/preempted`, TRUE or FALSE, answered as soon as it changes.
  https://cloud.google.com/compute/docs/instances/create-use-preemptible
  https://cloud.google.com/compute/docs/metadata/querying-metadata
- Azure: `scheduledevents`, JSON about all machines of a scale set or an availability set.
  https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime

import msgspec

from edl_runtime.concurrency import wait_for_event
from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder

POLL_EVERY_S = 2.0
"""Pause between two questions."""

ANSWER_TIMEOUT_S = 10.0

GCP_WAIT_S = 60
"""How long Google's metadata server holds back an answer that has not changed."""

GCP_LEFT_S = 30.0
"""Between Google's notice, which has no time in it, and the end of the machine."""

LEAST_LEFT_S = 5.0
"""A machine whose time is over, and that still runs, counts as there for so long."""

LATE_S = 60.0
"""A machine that is still there so long after its time stays: the notice was withdrawn."""

MOST_BYTES = 1 << 20

log = get_logger(__name__)


class PreemptionNotice(msgspec.Struct, frozen=True):
    """This machine is taken away at `ends_at`, by the monotonic clock, and `reason`, for people."""

    reason: str
    ends_at: float

    @property
    def left_s(self) -> float:
        """Seconds until then."""
        return max(LEAST_LEFT_S, self.ends_at - time.monotonic())

    @property
    def late_s(self) -> float:
        """Seconds since then, negative before."""
        return time.monotonic() - self.ends_at

    async def outlast(self, terminated: asyncio.Event) -> None:
        """Wait until `terminated` is set, or the machine stays after all: who exits earlier is started on it again."""
        await wait_for_event(terminated, max(0.0, LATE_S - self.late_s))


def watch_machine(source: str, on_notice: Callable[[PreemptionNotice], None]) -> None:
    """Call `on_notice` in the running event loop when a notice comes. `source`: as EDL_PREEMPTION_NOTICE; "" for never.

    A thread asks until then. It ends with the process.
    """
    if not source:
        return
    loop = asyncio.get_running_loop()

    def watch() -> None:
        notice = await_notice(source)
        with suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(on_notice, notice)

    threading.Thread(target=watch, name="edl preemption notice", daemon=True).start()


def await_notice(source: str) -> PreemptionNotice:
    """Return the notice once there is one. Blocks.

    A metadata server that does not answer, or not as documented, is logged once and asked again. So is one that
    announces what should have happened LATE_S ago: who left again for that would be started again, and leave again.
    """
    cloud, _, address = source.partition("=")
    ask, usual = _CLOUDS[cloud]
    url = (address or usual).rstrip("/")
    is_logged = False
    while True:
        trouble = ""
        try:
            notice = ask(url)
        except Exception as error:  # noqa: BLE001 - whatever it answers, it may announce something later
            notice, trouble = None, str(error) or type(error).__name__
        if notice and notice.late_s >= LATE_S:
            trouble = f"{notice.reason}, but its time was over {notice.late_s:.0f} s ago"
            notice = None
        if trouble and not is_logged:
            log.warning("preemption.unknown", url=url, cause=trouble)
            is_logged = True
        if notice:
            log.warning("preemption.announced", reason=notice.reason, left_s=round(notice.left_s))
            return notice
        time.sleep(POLL_EVERY_S)


class _InstanceAction(msgspec.Struct):
    action: str
    time: datetime


class _ScheduledEvent(msgspec.Struct, rename="pascal"):
    event_type: str
    resources: list[str] = []
    not_before: str = ""


class _ScheduledEvents(msgspec.Struct, rename="pascal"):
    events: list[_ScheduledEvent] = []


_action_decoder = JsonDecoder(_InstanceAction)
_events_decoder = JsonDecoder(_ScheduledEvents)

_ENDING = frozenset({"Preempt", "Terminate", "Redeploy", "Reboot"})
"""Azure's events that end what runs; a "Freeze" is a pause of seconds."""


def _ask_aws(url: str) -> PreemptionNotice | None:
    token, _ = _request(f"{url}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    try:
        text, _ = _request(f"{url}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    except urllib.error.HTTPError as error:
        if error.code == http.client.NOT_FOUND:
            return None
        raise
    found = _action_decoder.decode(text)
    return PreemptionNotice(f"AWS announces to {found.action} this machine", _monotonic(found.time))


def _ask_gcp(url: str) -> PreemptionNotice | None:
    """Ask, and wait for a change: one between two questions is seen by its etag."""
    path, headers = f"{url}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}
    text, answered = _request(path, headers)
    if text.strip() != "TRUE" and (etag := answered.get("ETag")):
        wait = f"?wait_for_change=true&timeout_sec={GCP_WAIT_S}&last_etag={etag}"
        text, _ = _request(path + wait, headers, wait_s=GCP_WAIT_S)
    if text.strip() != "TRUE":
        return None
    return PreemptionNotice("Google Cloud preempts this machine", time.monotonic() + GCP_LEFT_S)


def _ask_azure(url: str) -> PreemptionNotice | None:
    headers = {"Metadata": "true"}
    text, _ = _request(f"{url}/metadata/scheduledevents?api-version=2020-07-01", headers)
    ending = [event for event in _events_decoder.decode(text).events if event.event_type in _ENDING]
    if not ending:
        return None
    name, _ = _request(f"{url}/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers)
    for event in ending:
        if name.strip() in event.resources:
            at = _monotonic(parsedate_to_datetime(event.not_before)) if event.not_before else time.monotonic()
            return PreemptionNotice(f"Azure announces: {event.event_type} of this machine", at)
    return None


_CLOUDS: Mapping[str, tuple[Callable[[str], PreemptionNotice | None], str]] = {
    "aws": (_ask_aws, "http://169.254.169.254"),
    "gcp": (_ask_gcp, "http://metadata.google.internal"),
    "azure": (_ask_azure, "http://169.254.169.254"),
}

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would ask about its own machine


def _request(
    url: str, headers: Mapping[str, str], *, method: str = "GET", wait_s: float = 0.0
) -> tuple[str, Message[str, str]]:
    """Return body and headers of the answer. Raises OSError, HTTPException."""
    asked = urllib.request.Request(url, headers=dict(headers), method=method)  # noqa: S310 - the settings allow http only
    with _DIRECT.open(asked, timeout=ANSWER_TIMEOUT_S + wait_s) as response:
        return response.read(MOST_BYTES).decode(), response.headers


def _monotonic(at: datetime) -> float:
    return time.monotonic() + (at.astimezone(UTC) - datetime.now(UTC)).total_seconds()
