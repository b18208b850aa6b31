"""Serves the model in a folder by a Python pipeline of Paddle Serving 0.9.0, in its own environment (Python 3.8).

    python pipeline.py --model mnist_cnn_model --port 9292

Students reach it at paddle-pipeline+http://HOST:PORT/mnist?input=…&output=…
"""

import argparse
from pathlib import Path

from paddle_serving_server.web_service import Op, WebService

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="the folder of train_with_fleet.py --save_serving_model True")
parser.add_argument("--port", type=int, default=9292, help="for HTTP")
parser.add_argument("--grpc_port", type=int, default=9293, help="for gRPC")
args = parser.parse_args()

CONFIG = """
worker_num: 2
http_port: {port}
rpc_port: {grpc_port}
dag: {{is_thread_op: true}}
op:
  mnist:
    concurrency: 1
    local_service_conf:
      {{model_config: {model}, devices: "", client_type: local_predictor, fetch_list: [softmax_0.tmp_0]}}
"""


class Mnist(Op):
    """Passes tensors on to the model as they come, and its outputs back."""

    def preprocess(self, input_dicts, data_id, log_id):
        ((_, inputs),) = input_dicts.items()
        return {"img": inputs["img"]}, False, None, ""

    def postprocess(self, input_dicts, fetch_dict, data_id, log_id):
        return fetch_dict, None, ""


class Service(WebService):
    def get_pipeline_response(self, read_op):
        return Mnist(name="mnist", input_ops=[read_op])


config = Path("config.yml")
config.write_text(CONFIG.format(**vars(args)))
service = Service(name="mnist")
service.prepare_pipeline_config(str(config))
service.run_service()
