"""Fields of a TrainingJob that mean nothing any more, and what takes their place."""

from __future__ import annotations

_BY_THE_SERVER = "the API server had set it"
_BY_THE_CONTROLLER = "the original's controller had set it"
_NO_PORT = "there are no parameter servers, and trainers find each other's ports through Redis"
_NO_HOST = "trainers reach each other at the addresses of their pods"
_NO_MOUNT = "volumes and VolumeMounts say what is mounted where"
_NO_PROBE = "the trainers notice by themselves when one of them hangs or falls"
_NO_FRAMEWORK = "the script itself says what it trains with, and min-instance and max-instance how many train"
_NO_QUEUE = "the label kueue.x-k8s.io/queue-name in metadata.labels has all pods of a job start together"

METADATA = {
    "clusterName": _BY_THE_SERVER,
    "creationTimestamp": _BY_THE_SERVER,
    "generation": _BY_THE_SERVER,
    "managedFields": _BY_THE_SERVER,
    "resourceVersion": _BY_THE_SERVER,
    "selfLink": _BY_THE_SERVER,
    "uid": _BY_THE_SERVER,
}

SPEC = {
    "annotations": "metadata.annotations and metadata.labels are given to the pods",
    "frame_work": _NO_FRAMEWORK,
    "hostNetwork": _NO_HOST,
    "host_network": _NO_HOST,
    "is_nccl": "trainers use NCCL wherever they have GPUs",
    "local_job": _NO_FRAMEWORK,
    "master": "the trainers share out the samples among themselves, by a ledger in Redis",
    "matrix": "the image is one with edl_runtime in it",
    "mountPath": _NO_MOUNT,
    "mountpath": _NO_MOUNT,
    "nfsmount": _NO_MOUNT,
    "podGroupName": _NO_QUEUE,
    "port": _NO_PORT,
    "ports_num": _NO_PORT,
    "ports_num_for_sparse": _NO_PORT,
    "pserver": "every trainer holds the whole model, and they average their gradients among themselves",
    "trainer_package": "the script comes with the image, or from a volume",
    "trainer_port": _NO_PORT,
    "trainer_ports_num": _NO_PORT,
}

TRAINER = {
    "etcd-endpoint": "the trainers agree through the Redis of the connection, or of EDL_REDIS_URL",
    "grace_period_seconds": "a trainer that has to leave has 30 s to finish its step and write a checkpoint",
    "index_succeed": _BY_THE_CONTROLLER,
    "liveness_probe": _NO_PROBE,
    "pre_stop_cmd": "a trainer that has to leave finishes its step and writes a checkpoint, if it must, by itself",
    "readiness_probe": _NO_PROBE,
    "replicaSpec": _BY_THE_CONTROLLER,
}

TOP = {"status": _BY_THE_CONTROLLER}


def removed_note(path: str, instead: str) -> str:
    """Return the sentence about such a field."""
    return f"{path} means nothing any more: {instead}"
