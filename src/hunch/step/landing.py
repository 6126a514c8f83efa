"""What a step on the device did, told to the host's rows and to the engine.

Shape letters: R rows of the step, C columns of a result, G KV groups but the target's.
"""

from __future__ import annotations

from operator import is_

import numpy as np

from hunch.kernels.gpu_step import CHECKED, DRAFTED, FIRST, KNOWN, REASON, TOKENS
from hunch.sampling.stop import REASONS
from hunch.step.rows import RowBuffers
from hunch.types import Request, RowResult


def land_rows(
    rows: RowBuffers,
    row_R: np.ndarray,
    result_RC: np.ndarray,
    requests: list[Request | None],
    sources: list[str] | None,
    *,
    writes_kv: bool,
) -> tuple[list[int], list[RowResult]]:
    """Commit the rows' tokens, and say what each row got, as a `StepResult` does.

    `requests` sat in the rows when the step began; one that left since then changes no row, as
    another may sit there now. With `writes_kv` the drafter wrote its own KV beside the target's.
    `sources` are who drafted what was checked.
    """
    _commit(rows, row_R, result_RC, requests, writes_kv)
    is_more_R = (result_RC[:, TOKENS] != 1) | (result_RC[:, CHECKED] > 0)
    is_more_R |= result_RC[:, REASON] > 0
    if writes_kv:
        is_more_R[:] = True
    elif not is_more_R.any():
        return result_RC[:, FIRST].tolist(), []
    said = np.where(is_more_R, -1, result_RC[:, FIRST]).tolist()
    results: list[RowResult] = []
    places, row_R, result_RC = np.flatnonzero(is_more_R), row_R[is_more_R], result_RC[is_more_R]
    left_R = rows.end[row_R] - result_RC[:, KNOWN] + result_RC[:, TOKENS]
    checked = np.minimum(result_RC[:, CHECKED], np.maximum(left_R, 0)).tolist()
    lines = result_RC[:, : FIRST + result_RC[:, TOKENS].max()].tolist()
    has_others = len(rows.computed) > 1
    for place, row, line, num_checked in zip(
        places.tolist(), row_R.tolist(), lines, checked, strict=True
    ):
        request, num_tokens = requests[place], line[TOKENS]
        if not num_tokens or request is None:
            results.append(RowResult(row=row))  # it had ended before this step
            continue
        result = RowResult(
            row=row,
            tokens=line[FIRST : FIRST + num_tokens],
            num_processed=1,
            num_drafted=num_checked,
            num_accepted=num_tokens - 1,
            computed=(line[KNOWN] - 1,),
            num_nodes=line[DRAFTED],
            method=sources[place] if sources is not None and num_checked else "",
        )
        if has_others or line[REASON]:
            _complete(result, rows, request, REASONS[line[REASON]], writes_kv=writes_kv)
        results.append(result)
    return said, results


def _complete(
    result: RowResult, rows: RowBuffers, request: Request, finish: str | None, *, writes_kv: bool
) -> None:
    """Other KV groups, and the row's end; the row may be another request's by now."""
    row, is_there = result.row, rows.requests[result.row] is request
    gone = [result.computed[0] if writes_kv else 0] * (len(rows.computed) - 1)
    others = rows.computed[1:, row].tolist() if is_there else gone
    result.computed, result.finish = (*result.computed, *others), finish
    if finish is not None and is_there:
        rows.leave(row)


def _commit(
    rows: RowBuffers,
    row_R: np.ndarray,
    result_RC: np.ndarray,
    requests: list[Request | None],
    writes_kv: bool,
) -> None:
    """Write the tokens behind those known, and how many tokens of each row have KV."""
    held, num_R = [rows.requests[row] for row in row_R.tolist()], result_RC[:, TOKENS]
    if not all(map(is_, held, requests)) or not num_R.all():
        is_there_R = np.fromiter(map(is_, held, requests), np.bool_, len(held)) & (num_R > 0)
        row_R, result_RC, num_R = row_R[is_there_R], result_RC[is_there_R], num_R[is_there_R]
    known_R = result_RC[:, KNOWN]
    first_R = known_R - num_R
    for place in range(num_R.max(initial=0)):
        some = num_R > place if place else slice(None)
        rows.tokens[row_R[some], first_R[some] + place] = result_RC[some, FIRST + place]
    rows.known[row_R] = known_R
    rows.computed[0, row_R] = known_R - 1
    if writes_kv and len(rows.computed) > 1:
        others_GR = np.maximum(rows.computed[1:, row_R], known_R - 1)
        rows.computed[1:, row_R] = others_GR
