"""Asks a server by Paddle Serving's brpc Client; prints the answer as JSON. Argument: the address."""

import json
import sys

import numpy as np
from paddle_serving_client import Client

client = Client()
client.load_client_config(".")
client.connect([sys.argv[1]])
image = np.arange(2 * 784, dtype=np.float32).reshape(2, 1, 28, 28) % 11
answer = client.predict(feed={"image": image}, fetch=["logits"], batch=True)
print(json.dumps([answer["logits"].ravel().tolist(), answer["logits"].shape]))
