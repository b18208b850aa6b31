"""What tests on a real cluster share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from conftest import skip_on_a_laptop
from support.cluster.cluster import PADDLE_IMAGE, Cluster, own_namespace
from support.cluster.manifests import RESTRICTED


@pytest.fixture(scope="session")
def paddle_image() -> str:
    """An image of the runtime with Paddle that the cluster has."""
    image = os.environ.get(PADDLE_IMAGE, "")
    if not image:
        skip_on_a_laptop(f"{PADDLE_IMAGE} names no image with Paddle that the cluster has; see deploy/Dockerfile")
    return image


@pytest.fixture(scope="module")
def restricted(cluster: Cluster) -> Iterator[Cluster]:
    """A namespace that takes no other pods than those of PodSecurity's level `restricted`."""
    with own_namespace(cluster.kubeconfig, cluster.image, RESTRICTED) as made:
        yield made
