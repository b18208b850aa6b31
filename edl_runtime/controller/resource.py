"""A `TrainingJob` object of the cluster's API. Pure."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from edl_runtime.backends.interface import training_job_owner
from edl_runtime.backends.kubernetes.client import Manifest
from edl_runtime.backends.kubernetes.pod_template import mapping_at
from edl_runtime.compat.training_job import TrainingJob, to_training_job

FINALIZER = "edl-airflow/stop"
"""Keeps a deleted TrainingJob until its trainers have written a last checkpoint and ended."""

RECORDED = "edl-airflow/recorded-generation"
"""The annotation with the generation of the spec whose size the controller has written itself: it is the Job's."""

ORPHAN = "orphan"
"""Kubernetes' own finalizer of an object whose dependents shall outlive it."""


class Resource(msgspec.Struct, frozen=True):
    """A TrainingJob object, as the API server returns it."""

    manifest: Manifest

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.manifest["metadata"]["uid"])

    @property
    def generation(self) -> int:
        return int(self.manifest["metadata"].get("generation") or 0)

    @property
    def finalizers(self) -> list[str]:
        return list(self.manifest["metadata"].get("finalizers") or ())

    @property
    def is_deleting(self) -> bool:
        return bool(self.manifest["metadata"].get("deletionTimestamp"))

    @property
    def is_orphaning(self) -> bool:
        """Whether it was deleted by `kubectl delete --cascade=orphan`: its Job shall stay."""
        return ORPHAN in self.finalizers

    @property
    def status(self) -> dict[str, Any]:
        return dict(mapping_at(self.manifest, "status"))

    @property
    def has_ended(self) -> bool:
        """Whether its training ended, as its status says. It is not started again, also when its Job is gone."""
        return self.status.get("phase") in ("succeeded", "failed")

    @property
    def size(self) -> int | None:
        """The number of instances in its spec, None before the first was set."""
        size: int | None = mapping_at(self.manifest, "spec", "trainer").get("instances")
        return size

    @property
    def is_size_applied(self) -> bool:
        """Whether the Job has had the size of this spec. If it has another by now, somebody has resized the Job.

        The generation tells, since a person may set a size that was set before. One that we have recorded was applied
        from the beginning: the status, which is written later, may not say so yet.
        """
        recorded = mapping_at(self.manifest, "metadata", "annotations").get(RECORDED)
        return self.generation == self.status.get("appliedGeneration") or recorded == str(self.generation)

    @property
    def owner(self) -> str:
        """The owner in its Job's token, see `edl_runtime.backends.interface.token_owner`."""
        return training_job_owner(self.name, self.uid)

    @property
    def token(self) -> str:
        """The token of a Job that was made of this spec, whatever its size."""
        spec = dict(mapping_at(self.manifest, "spec"))
        spec["trainer"] = {name: value for name, value in mapping_at(spec, "trainer").items() if name != "instances"}
        digest = hashlib.sha256(msgspec.json.encode(spec, order="sorted")).hexdigest()
        return f"{self.owner}/{digest[:16]}"

    def training_job(self, volumes: str = "") -> TrainingJob:
        """Return the job that it describes, with `volumes` as in `read_training_job`. Raises SpecError."""
        metadata = self.manifest["metadata"]
        given = {key: metadata[key] for key in ("name", "labels") if key in metadata}
        annotations = {key: text for key, text in mapping_at(metadata, "annotations").items() if key != RECORDED}
        given["annotations"] = annotations
        spec = mapping_at(self.manifest, "spec")
        return to_training_job(
            {"apiVersion": self.manifest["apiVersion"], "kind": "TrainingJob", "metadata": given, "spec": spec}, volumes
        )
