"""Images that travel as bytes, made what the model takes."""

from __future__ import annotations

import numpy as np

from edl_runtime.protocol.oip import Normalise
from edl_runtime.protocol.tensors import Array


def normalise(pixels: Array, how: Normalise, out: Array) -> None:
    """Write (pixels - mean) / std into `out`, which is float32 and contiguous and has the shape of `pixels`.

    `how` must fit that shape: `decode_request` has seen to it.
    """
    mean, std = np.array(how.mean, np.float32), np.array(how.std, np.float32)
    if how.channels > 1:
        following = pixels.shape[how.axis + 1 :]
        if not following and how.axis > 1:  # channels last: as one axis with the one before, numpy's loops get longer
            *outer, width, channels = pixels.shape
            pixels, out = (array.reshape(*outer, width * channels) for array in (pixels, out))
            mean, std = (np.tile(np.broadcast_to(numbers, channels), width) for numbers in (mean, std))
        mean, std = (numbers.reshape(-1, *[1] * len(following)) for numbers in (mean, std))
    np.subtract(pixels, mean, out=out, dtype=np.float32)
    np.divide(out, std, out=out)
