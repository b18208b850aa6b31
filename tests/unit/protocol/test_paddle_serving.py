"""Messages of Paddle Serving before 0.7, whose tensors have no names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.paddle_serving import OLD_GENERAL, arrays_of_instances, old_response

IMAGE, IDS = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([[2**40], [-1]])


def instances(*samples: tuple[Any, Any]) -> Any:
    """Return those of a request with an image and an id in each."""
    request = OLD_GENERAL["Request"]()
    for image, number in samples:
        instance = request.insts.add()
        instance.tensor_array.add(elem_type=1, shape=image.shape, float_data=image.ravel())
        instance.tensor_array.add(elem_type=0, shape=number.shape, int64_data=number.ravel())
    return request.insts


def test_samples_are_rows_and_inputs_have_the_models_order() -> None:
    found = arrays_of_instances(instances(*zip(IMAGE, IDS, strict=True)), ["image", "id"])
    assert np.array_equal(found["image"], IMAGE)
    assert np.array_equal(found["id"], IDS)
    assert (found["image"].dtype, found["id"].dtype) == (np.float32, np.int64)


def test_outputs_have_the_order_of_the_request() -> None:
    answer = OLD_GENERAL["Response"].FromString(old_response({"id": IDS, "image": IMAGE}).SerializeToString())
    numbers, image = answer.outputs[0].insts[0].tensor_array
    assert np.array_equal(np.reshape(numbers.int64_data, numbers.shape), IDS)
    assert np.array_equal(np.reshape(image.float_data, image.shape), IMAGE)


def test_what_is_wrong_is_named() -> None:
    good = (IMAGE[0], IDS[0])
    with pytest.raises(ProtocolError, match="instance 0 has 2 tensors, the model takes 1: image"):
        arrays_of_instances(instances(good), ["image"])
    with pytest.raises(ProtocolError, match=r"'image': instance 1 is float32\[2\], allowed is float32\[3\]"):
        arrays_of_instances(instances(good, (IMAGE[0, :2], IDS[0])), ["image", "id"])
    text, short = instances(good), instances(good)
    text[0].tensor_array[0].elem_type = 20
    with pytest.raises(ProtocolError, match="'image': elem_type is 20, allowed are 0, 1, 2"):
        arrays_of_instances(text, ["image", "id"])
    short[0].tensor_array[1].shape[:] = [1 << 30]
    with pytest.raises(ProtocolError, match="'id'"):
        arrays_of_instances(short, ["image", "id"])
    with pytest.raises(ProtocolError, match="'y': float16 can't be sent"):
        old_response({"y": IMAGE.astype(np.float16)})
