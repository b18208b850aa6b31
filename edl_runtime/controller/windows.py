"""Traffic windows in a ConfigMap, read again whenever it changes."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from edl_runtime.autoscale.traffic.schema import read_windows
from edl_runtime.autoscale.traffic.windows import TrafficWindows
from edl_runtime.backends.errors import ConflictError
from edl_runtime.backends.kubernetes.client import KubernetesClient, Manifest
from edl_runtime.backends.kubernetes.pod_template import mapping_at
from edl_runtime.controller.status import Event, event_manifest
from edl_runtime.controller.vitals import Vitals
from edl_runtime.errors import EdlError, SpecError, isolated
from edl_runtime.log import get_logger

KEY = "windows.yaml"

RETRY_S = 5.0
"""Delay before a watch that the server has refused is repeated."""

log = get_logger(__name__)


class WindowsConfigMap:
    """The windows in key `windows.yaml` of the ConfigMap `name`: the last valid ones.

    - `windows`: None until there are some.
    - `version`: how often they were read.
    """

    def __init__(self, api: KubernetesClient, name: str, vitals: Vitals) -> None:
        self.windows: TrafficWindows | None = None
        self.version = 0
        self._api = api
        self._name = name
        self._vitals = vitals
        vitals.windows_problem = "the traffic windows are not read yet"
        self._changed = asyncio.Condition()

    async def follow(self) -> None:
        """Watch the ConfigMap. Never ends."""
        while True:
            try:
                with isolated("the watch of traffic windows"):
                    async for found in self._api.watch("ConfigMap", fields=f"metadata.name={self._name}"):
                        await self._read(found.get(self._name))
            except EdlError as error:
                log.warning("windows.not_watched", configmap=self._name, cause=str(error))
            await asyncio.sleep(RETRY_S)

    async def newer_than(self, version: int) -> None:
        """Wait until they have been read after that version."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version > version)

    async def _read(self, found: Manifest | None) -> None:
        if found is None:
            self._vitals.windows_problem = "there is no ConfigMap of traffic windows"
            log.warning("windows.missing", configmap=self._name, keeps=self.windows is not None)
            return
        try:
            with isolated(f"data.{KEY}"):
                self.windows = _windows_in(found)
        except EdlError as error:
            kept = "the last valid ones hold" if self.windows else "nothing is rescaled until there are valid ones"
            self._vitals.windows_problem = "the traffic windows are not valid: an event of their ConfigMap says why"
            log.warning("windows.invalid", configmap=self._name, cause=str(error))
            await self._warn(found, f"{error}; {kept}")
            return
        self._vitals.windows_problem = ""
        async with self._changed:
            self.version += 1
            self._changed.notify_all()
        log.info("windows.read", configmap=self._name)

    async def _warn(self, found: Manifest, message: str) -> None:
        about = {"apiVersion": "v1", **found}
        with suppress(ConflictError):  # a controller before this one has made it
            await self._api.create(event_manifest(about, Event("Warning", "InvalidWindows", message), time.time()))


def _windows_in(found: Manifest) -> TrafficWindows:
    text = mapping_at(found, "data").get(KEY)
    if text is None:
        raise SpecError(f"data.{KEY}", None, "traffic windows, as for `edl windows`")
    return read_windows(text)
