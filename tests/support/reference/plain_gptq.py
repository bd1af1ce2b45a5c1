"""GPTQ as published, in double precision numpy: three factorizations, one column at a time.

With a drift, the sum of (x' - x) x^T, it is GPTAQ. Qronos is written from its definition: a
least-squares problem is solved before and after every column.

Follows the loop of the paper's own code and of GPTQModel, blocks of 128 included, because the
scales of a group are taken from weights that have seen the errors of whole blocks only.
"""

import numpy as np


def stored_scale(scale, scale_dtype):
    """Round a scale to the eight significant bits of bfloat16, from 2^-17 up."""
    if scale_dtype == "float32":
        return scale
    mantissa, exponent = np.frexp(scale)
    return np.maximum(np.ldexp(np.round(mantissa * 256), exponent - 8), 2.0**-17)


def find_scale(part_RK, bits, symmetric, scale_dtype):
    """Return scale and zero point per row, zero always inside the range."""
    low = np.minimum(part_RK.min(1), 0)
    high = np.maximum(part_RK.max(1), 0)
    if symmetric:
        high = np.maximum(-low, high)
        low = -high
    empty = (low == 0) & (high == 0)
    low[empty], high[empty] = -1, 1
    top = 2**bits - 1
    scale = stored_scale((high - low) / top, scale_dtype)
    half = np.full_like(scale, 2 ** (bits - 1))
    return scale, half if symmetric else np.minimum(np.round(-low / scale), top)


def find_order(diagonal, group, act_order, act_group_aware):
    """Return the order of columns, ties in the original order."""
    columns = len(diagonal)
    if act_order:
        return np.argsort(-diagonal, kind="stable")
    if not act_group_aware:
        return np.arange(columns)
    full = [range(a, a + group) for a in range(0, columns - columns % group, group)]
    inside = [sorted(g, key=lambda c: -diagonal[c]) for g in full]
    inside.sort(key=lambda g: -diagonal[g[0]])
    tail = range(columns - columns % group, columns)
    return np.array([c for g in inside for c in g] + list(tail))


def gptq(
    weight_RC,
    gram_CC,
    *,
    bits,
    group,
    symmetric=True,
    act_order=False,
    act_group_aware=False,
    static_groups=False,
    scale_dtype="float32",
    damp=0.05,
    block=128,
    drift_CC=None,
    alpha=0.25,
    order=None,
    find=None,
    kept=0,
    keep=None,
):
    """Return unsigned codes and dequantized weights in the original order of columns.

    The last `kept` ones of the order are rounded by `keep`, and take up what others have lost.
    """
    weight, hessian = weight_RC.astype(np.float64).copy(), gram_CC.astype(np.float64).copy()
    rows, columns = weight.shape
    group = columns if group == -1 else min(group, columns)
    dead = np.diag(hessian) == 0
    mean = np.diag(hessian)[~dead].mean()
    hessian[dead, dead] = mean
    weight[:, dead] = 0

    def usual(part_RK):
        return find_scale(part_RK, bits, symmetric, scale_dtype)

    find, rest = find or usual, columns - kept
    static = [find(weight[:, a : a + group]) for a in range(0, columns, group)]

    ranked = np.where(dead, 0.0, np.diag(hessian))
    if order is None:
        order = find_order(ranked, group, act_order, act_group_aware)
    weight, hessian = weight[:, order], hessian[np.ix_(order, order)]
    hessian[np.diag_indices(columns)] += damp * mean
    inverse = np.linalg.inv(hessian)
    upper = np.linalg.cholesky(inverse).T
    fed = np.zeros_like(upper)
    if drift_CC is not None:
        drift = drift_CC.astype(np.float64)[np.ix_(order, order)]
        fed = alpha * np.triu(drift @ upper.T, 1) @ upper

    codes, result = np.zeros((rows, columns)), np.zeros((rows, columns))
    for i1 in range(0, rest, block):
        i2 = min(i1 + block, rest)
        inner, errors = weight[:, i1:i2].copy(), np.zeros((rows, i2 - i1))
        for i in range(i1, i2):
            if static_groups:
                scale, zero = static[order[i] // group]
            elif i % group == 0:
                scale, zero = find(weight[:, i : min(i + group, rest)])
            column = inner[:, i - i1].copy()
            code = np.clip(np.round(column / scale) + zero, 0, 2**bits - 1)
            codes[:, i], result[:, i] = code, scale * (code - zero)
            error = (column - result[:, i]) / upper[i, i]
            inner[:, i - i1 :] -= np.outer(error, upper[i, i:i2])
            inner[:, i - i1 :] += np.outer(column, fed[i, i:i2])
            errors[:, i - i1] = error
        weight[:, i2:] += inner @ fed[i1:i2, i2:] - errors @ upper[i1:i2, i2:]
    if kept:
        result[:, rest:] = keep(weight[:, rest:])
    back = np.argsort(order)
    return codes[:, back], result[:, back]


def qronos(weight_RC, own_TC, full_TC, *, bits, group, symmetric, act_order, damp):
    """Return dequantized weights, on scales of the original weights in float32.

    Before a column is rounded it is set to where it undoes best the error so far, the columns
    behind it staying where they are; behind it, these move to where they do.
    """
    weight = weight_RC.astype(np.float64)
    hessian, target = own_TC.T @ own_TC, weight @ full_TC.T @ own_TC
    weight[:, np.diag(hessian) == 0] = 0
    columns = weight.shape[1]
    group = columns if group == -1 else min(group, columns)
    parts = [weight[:, a : a + group] for a in range(0, columns, group)]
    scales = [find_scale(part, bits, symmetric, "float32") for part in parts]
    damped = hessian + damp * np.linalg.eigvalsh(hessian)[-1] * np.eye(columns)
    order = np.argsort(-np.diag(hessian), kind="stable") if act_order else np.arange(columns)
    moved = weight.copy()
    pulled = target + weight @ (damped - hessian)  # damping draws towards the weights
    for step, column in enumerate(order):
        others = np.delete(np.arange(columns), column)
        used, wanted = (damped, pulled) if step else (hessian, target)
        size = used[column, column] or 1
        best = (wanted[:, column] - moved[:, others] @ used[others, column]) / size
        scale, zero = scales[column // group]
        code = np.clip(np.round(best / scale) + zero, 0, 2**bits - 1)
        moved[:, column] = scale * (code - zero)
        left, gone = order[step + 1 :], order[: step + 1]
        if len(left):
            rest = pulled[:, left] - moved[:, gone] @ damped[np.ix_(gone, left)]
            moved[:, left] = np.linalg.solve(damped[np.ix_(left, left)], rest.T).T
    return moved
