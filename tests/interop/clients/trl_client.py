"""TRL's own client scores sequences: `trl_client.py URL JSON`; prints what it returns.

Its file imports torch, transformers and vllm for what is not used here; empty modules stand in for them.
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
from importlib.util import find_spec
from unittest.mock import MagicMock

ABSENT = {"torch", "transformers", "vllm", "vllm_ascend"}


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes modules of which everything can be imported."""

    def find_spec(self, name, path, target=None):  # noqa: ARG002 - importlib calls it so
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Absent())
(folder,) = find_spec("trl").submodule_search_locations
for name, path in (("trl", folder), ("trl.generation", f"{folder}/generation")):
    sys.modules[name] = types.ModuleType(name)  # not its __init__, which imports far more
    sys.modules[name].__path__ = [path]
found = importlib.import_module("trl.import_utils")
found.is_vllm_available = lambda *_, **__: True
client_file = importlib.import_module("trl.generation.vllm_client")

asked = json.loads(sys.argv[2])
client = client_file.VLLMClient(base_url=sys.argv[1], connection_timeout=60)
print(json.dumps(client.get_sequence_logprobs(**asked)))
