"""An S3 server in a pod, which takes nobody but its one user: see tests/kubernetes/services."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any, Self

from support.cluster.cluster import Cluster
from support.cluster.manifests import create, remove

S3_IMAGE = "EDL_TEST_S3_IMAGE"
"""The variable that names an image with an S3 server that the cluster has."""

BUCKET = "runs"
_UNCHECKED = 4
"""Actions that the server takes from anybody: those by which `_admit` makes the user and the bucket."""

_WITHIN_S = 120.0


class ObjectStoreService:
    """A server behind the Service `edl-s3` of a cluster's namespace, with an empty bucket.

    - `secret`: the Secret with all that its user's pods need in their environment.
    - `environ`: the same for this machine.
    """

    name = "edl-s3"
    secret = "edl-s3-user"
    port = 5000

    def __init__(self, cluster: Cluster) -> None:
        self.environ: dict[str, str] = {}
        self._cluster = cluster
        labels = {"app": self.name}
        container = {
            "name": "s3",
            "image": os.environ[S3_IMAGE],
            "args": ["moto_server", "--host", "0.0.0.0", "--port", str(self.port)],
            "env": [
                {"name": "INITIAL_NO_AUTH_ACTION_COUNT", "value": str(_UNCHECKED)},
                {"name": "S3_IGNORE_SUBDOMAIN_BUCKETNAME", "value": "true"},  # its Service's name is no bucket's
            ],
            "readinessProbe": {"tcpSocket": {"port": self.port}, "periodSeconds": 1},
            "resources": {"requests": {"cpu": "20m"}},
        }
        template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
        self._objects: list[dict[str, Any]] = [
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": self.name},
                "spec": {"selector": {"matchLabels": labels}, "template": template},
            },
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": self.name},
                "spec": {"selector": labels, "ports": [{"port": self.port}]},
            },
        ]

    def __enter__(self) -> Self:
        asyncio.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run(remove(self._cluster, *self._objects))

    async def _start(self) -> None:
        await create(self._cluster, *self._objects)
        space = f"/api/v1/namespaces/{self._cluster.namespace}"
        service = await self._cluster.ask("GET", f"{space}/services/{self.name}")
        here = f"http://{service['spec']['clusterIP']}:{self.port}"
        user = await asyncio.to_thread(_admit, here)
        self.environ = {"AWS_ENDPOINT_URL_S3": here, **user}
        inside = f"http://{self.name}.{self._cluster.namespace}.svc:{self.port}"
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": self.secret},
            "stringData": {**user, "AWS_ENDPOINT_URL_S3": inside},
        }
        await create(self._cluster, secret)
        self._objects.append(secret)


def _admit(url: str) -> dict[str, str]:
    """Make a user who may use all of S3, and a bucket; return the user's variables."""
    import boto3  # type: ignore[import-untyped]
    from botocore.config import Config  # type: ignore[import-untyped]

    region = {"AWS_DEFAULT_REGION": "us-east-1"}
    anybody = {
        "endpoint_url": url,
        "aws_access_key_id": "anybody",
        "aws_secret_access_key": "anything",
        "region_name": region["AWS_DEFAULT_REGION"],
        "config": Config(retries={"total_max_attempts": 1}),  # each answered attempt counts
    }
    _wait(url)
    statement = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    iam = boto3.client("iam", **anybody)
    iam.create_user(UserName="trainer")
    iam.put_user_policy(UserName="trainer", PolicyName="all-of-s3", PolicyDocument=policy)
    key = iam.create_access_key(UserName="trainer")["AccessKey"]
    boto3.client("s3", **anybody).create_bucket(Bucket=BUCKET)
    return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"], **region}


def _wait(url: str) -> None:
    """Return when the server answers by its Service."""
    from urllib.error import URLError
    from urllib.request import urlopen

    deadline = time.monotonic() + _WITHIN_S
    while True:
        try:
            with urlopen(f"{url}/moto-api/", timeout=5):
                return
        except (URLError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
