"""Asks a server by Paddle Serving's HttpClient; prints the answer as JSON. Arguments: address, and how to ask."""

import json
import sys

import numpy as np
from paddle_serving_client.httpclient import HttpClient

address, *how = sys.argv[1:]
client = HttpClient()
client.load_client_config("serving_client_conf.prototxt")
client.set_http_proto("json" not in how)
client.set_use_grpc_client("grpc" in how)
client.set_request_compress("gzip" in how)
client.set_response_compress("gzip" in how)
client.connect([address])
image = np.arange(2 * 784, dtype=np.float32).reshape(2, 1, 28, 28) % 11
answer = client.predict(feed={"image": image}, fetch=["logits"], batch=True)
if isinstance(answer, dict):
    tensor = answer["outputs"][0]["tensor"][0]
    print(json.dumps([tensor["float_data"], tensor["shape"]]))
else:
    tensor = answer.outputs[0].tensor[0]
    print(json.dumps([list(tensor.float_data), list(tensor.shape)]))
