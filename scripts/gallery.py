"""Runs examples at their smallest settings, and keeps the pictures that they make in docs/images: `make gallery`.

    python scripts/gallery.py word2vec job_server    # only these

It takes about ten minutes on two cores, and needs what `make datasets` gets. The pictures of `vision_distill` and
`text_distill` are of longer runs: their pages have the commands.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from drawings import IMAGES

from edl_runtime.store.redis_server import RedisServer

ROOT = Path(__file__).resolve().parents[1]

TOOLS = """
together() {  # JOB COUNT [SECONDS]: wait until so many instances train together, and for ten seconds more, or so many
  until edl events "$1" 2>/dev/null | grep resumed | tail -n 1 | grep -Eq "instances?( [0-9]+){$2} "; do sleep 1; done
  sleep "${3:-10}"
}
resized() {  # JOB COUNT [SECONDS]
  edl resize "$1" "$2"
  together "$@"
}
drawn() {  # JOB: draw its curve
  python "$EXAMPLES/elastic_train/curve.py" "$1" "$PICTURE"
}
end_all() {
  for job in $(ls "$EDL_WORK_DIR/jobs" 2>/dev/null); do edl stop "$job" || true; done
  kill $(jobs -p) 2>/dev/null || true
  wait
}
trap end_all EXIT
"""

PICTURES = {
    "mnist_distill": """
python "$EXAMPLES/mnist_distill/train_teacher.py" --model-dir teacher
edl teacher --model teacher --outputs logits=fetch_name_0 --port "$PORT" &
EDL_RESULT_FILE=result.json python "$EXAMPLES/mnist_distill/student.py" \\
  --use_distill_service --distill_teachers "127.0.0.1:$PORT" --epochs 12
python "$EXAMPLES/mnist_distill/report.py" result.json --picture "$PICTURE"
""",
    "resnet_distill": """
python "$EXAMPLES/collective_resnet/write_folder.py" --data_dir="$DATASETS/fashion" --rows=320 --test_rows=100 ImageNet
train() {
  python "$EXAMPLES/resnet_distill/train.py" --data_dir=ImageNet --class_dim=10 --image_shape=3,32,32 \\
    --resize_short_size=36 --lower_scale=0.5 --num_workers=0 --fetch_steps=1 --batch_size=16 "$@"
}
train --model=ResNet34_vd --num_epochs=3
edl teacher --model output/ResNet34_vd/teacher --outputs logits=fetch_name_0 --port "$PORT" &
EDL_JOB=resnet train --model=ResNet18_vd --num_epochs=2 \\
  --use_distill_service=True --distill_teachers="127.0.0.1:$PORT"
drawn resnet
""",
    "paddle_serving": """
python "$EXAMPLES/paddle_serving/train_with_fleet.py" --save_serving_model True --curves curves
edl teacher --model mnist_cnn_model --port "$PORT" &
python "$EXAMPLES/paddle_serving/train_with_fleet.py" --use_distill_service True \\
  --distill_teachers "127.0.0.1:$PORT" --curves curves
python "$EXAMPLES/vision_distill/curves.py" curves "$PICTURE"
""",
    "burst_pool": """
python "$EXAMPLES/burst_pool/two_places.py" --picture "$PICTURE"
""",
    "elastic_train": """
edl run --name digits --instances 1:3 "$EXAMPLES/elastic_train/train.py" --epochs 1000 --pause-s 0.1 &
together digits 1
resized digits 3
resized digits 1
drawn digits
""",
    "collective_resnet": """
python "$EXAMPLES/collective_resnet/write_folder.py" --data_dir="$DATASETS/fashion" --rows=640 --test_rows=200 ImageNet
edl run --name resnet --instances 1:2 "$EXAMPLES/collective_resnet/train.py" --model=ResNet18 --data_dir=ImageNet \\
  --class_dim=10 --image_shape=3,32,32 --resize_short_size=36 --lower_scale=0.5 --batch_size=32 \\
  --total_batch_size=32 --num_epochs=1000 --num_workers=0 &
together resnet 1 60
resized resnet 2 60
resized resnet 1 60
drawn resnet
""",
    "word2vec": """
python "$EXAMPLES/word2vec/prepare.py" --data_dir "$DATASETS/wordnet" --rows 20000 --out few
edl run --name word2vec --instances 1:3 "$EXAMPLES/word2vec/train.py" --data few --passes 1000 &
together word2vec 1 30
resized word2vec 3 30
resized word2vec 1 30
drawn word2vec
""",
    "training_job": """
cp -r "$EXAMPLES/mnist_distill" "$EXAMPLES/elastic_train" .
sed 's/passes: 2/passes: 1000/' "$EXAMPLES/training_job/examplejob.yaml" > examplejob.yaml
edl submit -f examplejob.yaml --workspace elastic_train
together example 1
resized example 2
drawn example
""",
    "job_server": """
cp "$EXAMPLES"/job_server/* .
export PADDLE_RUNING_ENV=PADDLE_EDL PADDLE_JOBSERVER="http://127.0.0.1:$PORT" PADDLE_JOB_ID=pods PADDLE_POD_ID="not set"
export PADDLE_EDL_IMAGENET_PATH="$DATASETS/fashion" PADDLE_EDL_FLEET_CHECKPOINT_PATH="$PWD/fleet_checkpoints"
sed -i "s#./train.py#$EXAMPLES/job_server/train.py#" train_pretrain.sh
python -u -m edl_runtime.demo.job_server --node_ips 127.0.0.1 --pod_num_of_node 2 --gpu_num_of_node 2 \\
  --time_interval_to_change 86400 --job_id pods --server_port "$PORT" &
server=$!
python -u -m edl_runtime.demo.job_client --package_sh ./package.sh --pod_path ./resnet_pod \\
  ./train_pretrain.sh --rows=2000 --num_epochs=1000 &
together pods 2
kill -USR1 $server
together pods 1
kill -USR1 $server
together pods 2
drawn pods
""",
}
"""What makes an example's picture, as `$PICTURE`, in bash; what it leaves in the background is ended after it."""


def make_picture(example: str) -> Path:
    """Run an example in an empty folder, with a Redis of its own. Raises CalledProcessError where a command fails."""
    picture = IMAGES / f"example-{example.replace('_', '-')}.svg"
    with (
        tempfile.TemporaryDirectory() as made,
        RedisServer(Path(made) / "redis") as redis,
        socket.create_server(("127.0.0.1", 0)) as listening,
    ):
        folder, port = Path(made) / "work", listening.getsockname()[1]
        listening.close()
        folder.mkdir()
        others = {name: value for name, value in os.environ.items() if not name.startswith(("EDL_", "PADDLE_"))}
        environ = others | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "EDL_REDIS_URL": redis.url,
            "EDL_WORK_DIR": f"{made}/jobs",
            "EDL_TEACHER_WAIT_S": "600",
            "EXAMPLES": str(ROOT / "examples"),
            "DATASETS": str(ROOT / ".datasets"),
            "PICTURE": str(picture),
            "PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "GLOG_minloglevel": "2",
            "PYTHONWARNINGS": "ignore",
        }
        commands = f"set -e\n{TOOLS}{PICTURES[example]}"
        subprocess.run(["/bin/bash", "-c", commands], cwd=folder, env=environ, check=True)
    return picture


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        print(make_picture(name))  # noqa: T201
