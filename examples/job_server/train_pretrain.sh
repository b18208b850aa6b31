#!/bin/bash
# What each pod runs, with the arguments of the JobClient's command
unset https_proxy http_proxy

python -m edl_runtime.demo.launch \
    --log_dir log \
    --log_level 20 \
    ./train.py \
    --data_dir=./ImageNet \
    --batch_size=64 \
    --lr=0.05 \
    "$@"
