"""A Python pipeline of Paddle Serving with a model, `net`: started in an empty folder, with ports for HTTP and gRPC."""

import sys
from pathlib import Path

import numpy as np
import paddle
from paddle_serving_server.web_service import Op, WebService

http_port, grpc_port = sys.argv[1:]
FOLDER = Path("model")
CONFIG = """
worker_num: 2
http_port: {http_port}
rpc_port: {grpc_port}
dag: {{is_thread_op: true}}
op:
  net:
    concurrency: 1
    local_service_conf: {{model_config: model, devices: "", client_type: local_predictor, fetch_list: [logits]}}
"""
VARIABLE = '{kind}_var {{ name: "{name}" alias_name: "{alias}" is_lod_tensor: false {kind}_type: 1 {shape} }}\n'


def save_model():
    paddle.enable_static()
    image = paddle.static.data("image", [None, 1, 28, 28], "float32")
    weights = (np.arange(7840, dtype=np.float32) % 7 - 3).reshape(784, 10)
    assign = paddle.nn.initializer.Assign(weights)
    parameter = paddle.static.create_parameter([784, 10], "float32", default_initializer=assign)
    logits = paddle.matmul(paddle.reshape(image, [-1, 784]), parameter)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    FOLDER.mkdir(exist_ok=True)
    paddle.static.save_inference_model(str(FOLDER / "net"), [image], [logits], executor)
    described = VARIABLE.format(kind="feed", name="image", alias="image", shape="shape: 1 shape: 28 shape: 28")
    described += VARIABLE.format(kind="fetch", name=logits.name, alias="logits", shape="shape: 10")
    (FOLDER / "serving_server_conf.prototxt").write_text(described)


class Net(WebService):
    class Answer(Op):
        def preprocess(self, input_dicts, data_id, log_id):
            ((_, inputs),) = input_dicts.items()
            return {"image": inputs["image"]}, False, None, ""

        def postprocess(self, input_dicts, fetch_dict, data_id, log_id):
            return fetch_dict, None, ""

    def get_pipeline_response(self, read_op):
        return self.Answer(name="net", input_ops=[read_op])


save_model()
Path("config.yml").write_text(CONFIG.format(http_port=http_port, grpc_port=grpc_port))
service = Net(name="net")
service.prepare_pipeline_config("config.yml")
service.run_service()
