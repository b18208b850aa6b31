"""Fields of a TrainingJob that are ignored, each with the reason or its replacement."""

from __future__ import annotations

_BY_THE_CONTROLLER = "EDL's controller set it"
_NO_FRAMEWORK = "the script imports its framework, and min-instance and max-instance set the number of trainers"

METADATA = dict.fromkeys(
    ("clusterName", "creationTimestamp", "generation", "managedFields", "resourceVersion", "selfLink", "uid"),
    "the API server set it",
)
SPEC = {
    "annotations": "pods get metadata.annotations and metadata.labels",
    "frame_work": _NO_FRAMEWORK,
    **dict.fromkeys(("hostNetwork", "host_network"), "trainers connect to the addresses of their pods"),
    "is_nccl": "trainers use NCCL wherever they have GPUs",
    "local_job": _NO_FRAMEWORK,
    "master": "a ledger in Redis assigns samples to trainers",
    "matrix": "the image contains edl_runtime",
    **dict.fromkeys(("mountPath", "mountpath", "nfsmount"), "volumes and VolumeMounts set the mounts"),
    "podGroupName": "the label kueue.x-k8s.io/queue-name in metadata.labels starts all pods of a job together",
    **dict.fromkeys(
        ("port", "ports_num", "ports_num_for_sparse", "trainer_port", "trainer_ports_num"),
        "there are no parameter servers, and trainers find each other's ports through Redis",
    ),
    "pserver": "every trainer holds the whole model, and trainers average their gradients",
    "trainer_package": "the script is in the image, or on a volume",
}
TRAINER = {
    "etcd-endpoint": "trainers use the Redis of the connection, or of EDL_REDIS_URL",
    "grace_period_seconds": "a trainer that leaves has 30 s to finish its step and write a checkpoint",
    "pre_stop_cmd": "a trainer that leaves finishes its step and writes a checkpoint if needed",
    **dict.fromkeys(("index_succeed", "replicaSpec"), _BY_THE_CONTROLLER),
    **dict.fromkeys(("liveness_probe", "readiness_probe"), "trainers detect by themselves that one hangs or fails"),
}
TOP = {"status": _BY_THE_CONTROLLER}
