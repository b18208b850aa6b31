"""An S3 server in a pod, with one user."""

from __future__ import annotations

import asyncio
import json
import os

from support.cluster.cluster import Cluster, PodService

S3_IMAGE = "EDL_TEST_S3_IMAGE"
"""The variable that names an image with an S3 server (services/Dockerfile)."""

BUCKET = "runs"
_UNCHECKED = 4
"""Actions that the server allows without authorization: those by which `_create_user` makes the user and the bucket."""


class ObjectStoreService(PodService):
    """An S3 server with an empty bucket.

    - `secret`: the Secret with all that its user's pods need in their environment.
    - `environ`: the same for this machine.
    """

    name = "edl-s3"
    secret = "edl-s3-user"
    port = 5000

    def __init__(self, cluster: Cluster) -> None:
        env = [
            {"name": "INITIAL_NO_AUTH_ACTION_COUNT", "value": str(_UNCHECKED)},
            {
                "name": "S3_IGNORE_SUBDOMAIN_BUCKETNAME",
                "value": "true",
            },  # the name of its Service is not a bucket's name
        ]
        args = ["moto_server", "--host", "0.0.0.0", "--port", str(self.port)]
        super().__init__(cluster, image=os.environ[S3_IMAGE], args=args, env=env)
        self.environ: dict[str, str] = {}
        self._secrets = f"/api/v1/namespaces/{cluster.namespace}/secrets"

    async def _start(self) -> None:
        await super()._start()
        here = f"http://{self.host}:{self.port}"
        user = await asyncio.to_thread(_create_user, here)
        self.environ = {"AWS_ENDPOINT_URL_S3": here, **user}
        texts = {**user, "AWS_ENDPOINT_URL_S3": f"http://{self.address_in_cluster}"}
        await self._cluster.request("POST", self._secrets, {"metadata": {"name": self.secret}, "stringData": texts})

    async def _stop(self) -> None:
        await super()._stop()
        await self._cluster.request("DELETE", f"{self._secrets}/{self.secret}")

    def _answers(self) -> bool:
        from urllib.request import urlopen

        try:
            with urlopen(f"http://{self.host}:{self.port}/moto-api/", timeout=5):
                return True
        except OSError:
            return False


def _create_user(url: str) -> dict[str, str]:
    """Make a user with all rights on S3, and a bucket; return the user's variables."""
    import boto3  # type: ignore[import-untyped]
    from botocore.config import Config  # type: ignore[import-untyped]

    region = {"AWS_DEFAULT_REGION": "us-east-1"}
    anonymous = {
        "endpoint_url": url,
        "aws_access_key_id": "anonymous",
        "aws_secret_access_key": "anything",
        "region_name": region["AWS_DEFAULT_REGION"],
        "config": Config(retries={"total_max_attempts": 1}),  # each answered attempt counts
    }
    statement = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    iam = boto3.client("iam", **anonymous)
    iam.create_user(UserName="trainer")
    iam.put_user_policy(UserName="trainer", PolicyName="all-of-s3", PolicyDocument=policy)
    key = iam.create_access_key(UserName="trainer")["AccessKey"]
    boto3.client("s3", **anonymous).create_bucket(Bucket=BUCKET)
    return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"], **region}
