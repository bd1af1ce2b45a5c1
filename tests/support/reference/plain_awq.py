"""AutoAWQ's search in double precision numpy, on the activations themselves.

One linear group at a time, without Gram matrices: outputs are multiplied out and compared.
"""

import numpy as np

from tests.support.reference.plain_gptq import find_scale, stored_scale


def round_groups(weight_RC, bits, group, zero_point, scale_dtype="float32"):
    """Round every group of every row on its own grid, and then the scale of the grid."""
    result = np.empty_like(weight_RC)
    group = weight_RC.shape[1] if group == -1 else group
    for start in range(0, weight_RC.shape[1], group):
        part = weight_RC[:, start : start + group]
        scale, zero = find_scale(part, bits, not zero_point, "float32")
        scale, zero = scale[:, None], zero[:, None]
        code = np.clip(np.round(part / scale) + zero, 0, 2**bits - 1)
        result[:, start : start + group] = (code - zero) * stored_scale(scale, scale_dtype)
    return result


TWENTIETHS = [step / 20 for step in range(20)]


def search_scale(weight_RC, x_TC, *, bits, group, zero_point, tie=None, ratios=TWENTIETHS):
    """Return the scale per column with the least output error, out of 20; None scales nothing."""
    columns = weight_RC.shape[1]
    tie = np.arange(columns) if tie is None else tie
    x_mean, w_mean = np.abs(x_TC).mean(0), np.empty(columns)
    size = columns if group == -1 else group
    for start in range(0, columns, size):
        part = np.abs(weight_RC[:, start : start + size])
        w_mean[start : start + size] = (part / (part.max(1, keepdims=True) + 1e-6)).mean(0)
    for index in set(tie.tolist()):
        x_mean[tie == index] = x_mean[tie == index].mean()
        w_mean[tie == index] = w_mean[tie == index].mean()
    best, lowest, output = None, np.inf, x_TC @ weight_RC.T
    for ratio in ratios:
        scale = np.ones(columns)
        if ratio is not None:
            scale = np.maximum(x_mean**ratio / (w_mean ** (1 - ratio) + 1e-4), 1e-4)
            scale = scale / np.sqrt(scale.max() * scale.min())
        rounded = round_groups(weight_RC * scale, bits, group, zero_point) / scale
        loss = ((x_TC @ rounded.T - output) ** 2).mean()
        if loss < lowest:
            best, lowest = scale, loss
    return best


def clip_and_round(weight_RC, x_TC, *, bits, group, zero_point, scale_dtype="float32"):
    """Clip each group of each row by the best of 10 factors for its own output, and round."""
    columns = weight_RC.shape[1]
    size = columns if group == -1 else group
    result = np.empty_like(weight_RC)
    for start in range(0, columns, size):
        part, x = weight_RC[:, start : start + size], x_TC[:, start : start + size]
        for row in range(len(weight_RC)):
            lowest, output = np.inf, x @ part[row]
            for step in range(10):
                bound = np.abs(part[row]).max() * (1 - step / 20)
                clipped = np.clip(part[row], -bound, bound)[None]
                rounded = round_groups(clipped, bits, -1, zero_point)[0]
                loss = ((x @ rounded - output) ** 2).mean()
                if loss < lowest:
                    best, lowest = clipped, loss
            stored = round_groups(best, bits, -1, zero_point, scale_dtype)[0]
            result[row, start : start + size] = stored
    return result
