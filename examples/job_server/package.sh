#!/bin/bash
# Prepares the folder of a pod: package.sh -pod_id ID
set -e
[[ $1 == -pod_id && -n $2 ]] || { echo "usage: package.sh -pod_id ID" >&2; exit 2; }
source_dir=$(dirname "$(readlink -f "$0")")
pod_dir=${EDL_POD_PATH:-resnet_pod/$2}  # where the pod's script runs: --pod_path/ID

mkdir -p "$pod_dir"
[[ $pod_dir -ef $source_dir ]] || ln -sfn "$source_dir/train.py" "$source_dir/train_pretrain.sh" "$pod_dir"
ln -sfn "$PADDLE_EDL_IMAGENET_PATH" "$pod_dir/ImageNet"
