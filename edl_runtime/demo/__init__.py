"""The original EDL's JobServer and JobClient: a set of pods that changes on a schedule, each running a training script.

    python -m edl_runtime.demo.job_server --pod_num_of_node 4 --gpu_num_of_node 4 --time_interval_to_change 900
    python -m edl_runtime.demo.job_client --package_sh package.sh --pod_path pods train.sh
    python -m edl_runtime.demo.launch train.py    # in train.sh

The pods' trainers are instances of one elastic training, `edl agent`.
"""
