"""No manifest leads to anything but jobs that can be kept, or a SpecError."""

from __future__ import annotations

import contextlib
import copy
import string
from typing import Any

import msgspec
import yaml
from hypothesis import given
from hypothesis import strategies as st
from unit.compat.test_training_job import DEFINITION, TUTORIAL

from edl_runtime.backends.kubernetes.manifests import pod_template
from edl_runtime.compat.training_job import METADATA, SPEC, TRAINER, TrainingJob, read_training_job
from edl_runtime.errors import SpecError
from edl_runtime.pods import Pod
from edl_runtime.specs import JobSpec

FIELDS = st.sampled_from(
    [
        *(*METADATA.used, *SPEC.used, *TRAINER.used, *SPEC.ignored, *TRAINER.ignored),
        *("limits", "requests", "cpu", "memory", "nvidia.com/gpu", "name", "mountPath", "claimName", "subPath"),
        *("persistentVolumeClaim", "emptyDir", "status", "items", "kind"),
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["python a.py $A", "1Gi", "200m", "data", "/data", "List", "TrainingJob", "a 'b", "&&", "${"])
    | st.dates()
    | st.binary(max_size=3)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS | st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def almost_manifests(draw: st.DrawFn) -> Any:
    """Return one of the original's forms with anything at some of its places."""
    manifest: Any = copy.deepcopy(draw(st.sampled_from([TUTORIAL, DEFINITION])))
    for _ in range(draw(st.integers(1, 4))):
        place = manifest
        while isinstance(place, dict | list) and place:
            keys: list[Any] = sorted(place) if isinstance(place, dict) else list(range(len(place)))
            key = draw(st.sampled_from(keys))
            if not isinstance(place[key], dict | list) or not place[key] or draw(st.booleans()):
                place[draw(FIELDS) if isinstance(place, dict) and draw(st.booleans()) else key] = draw(VALUES)
                break
            place = place[key]
    return manifest


def read_or_refuse(text: str) -> None:
    with contextlib.suppress(SpecError):
        for job in read_training_job(text):
            check_kept(job)


def check_kept(job: TrainingJob) -> None:
    trainer = job.trainer
    spec = JobSpec(
        name=job.name,
        kind="trainer",
        command=tuple(trainer.command),
        bounds=job.bounds,
        instances=job.bounds.min,
        env=trainer.env,
        cwd=trainer.cwd,
        pod=trainer.pod,
    )
    assert msgspec.json.decode(msgspec.json.encode(spec), type=JobSpec).digest == spec.digest
    assert all(isinstance(note, str) for note in job.notes)
    pod_template(spec, Pod(image="i"))


@given(manifest=almost_manifests())
def test_whatever_stands_in_a_manifest(manifest: Any) -> None:
    """What is read can be sent, kept and made a pod."""
    read_or_refuse(yaml.safe_dump(manifest, allow_unicode=True))


@given(text=st.text(st.characters() | st.sampled_from("{}[]:,-&*!|>'\"%@`#\n \t" + string.ascii_letters), max_size=60))
def test_whatever_text_it_is(text: str) -> None:
    """YAML or not."""
    read_or_refuse(text)
