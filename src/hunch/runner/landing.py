"""What a step on the device did, told to the host's rows and to the engine.

Shape letters: R rows of the step, C columns of a result, G KV groups.
"""

from __future__ import annotations

from operator import is_

import numpy as np

from hunch.kernels.gpu_spec import CHECKED, DRAFTED, FIRST, KNOWN, REASON, TOKENS
from hunch.runner.rows import RowBuffers
from hunch.sampling.stop import REASONS
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
    computed_RG = _commit(rows, row_R, result_RC, requests, writes_kv)
    num_R = result_RC[:, TOKENS]
    is_more_R = (num_R != 1) | (result_RC[:, CHECKED] > 0) | (result_RC[:, REASON] > 0)
    if writes_kv:
        is_more_R[:] = True
    said = np.where(is_more_R, -1, result_RC[:, FIRST]).tolist()
    results: list[RowResult] = []
    for place in np.flatnonzero(is_more_R).tolist():
        row, line, request = int(row_R[place]), result_RC[place].tolist(), requests[place]
        num_tokens, known, checked = line[TOKENS], line[KNOWN], line[CHECKED]
        if not num_tokens or request is None:
            results.append(RowResult(row=row))  # it had ended before this step
            continue
        finish = REASONS[line[REASON]]
        if finish is not None and rows.requests[row] is request:
            rows.leave(row)
        result = RowResult(
            row=row,
            tokens=line[FIRST : FIRST + num_tokens],
            num_processed=1,
            num_accepted=num_tokens - 1,
            finish=finish,
            computed=tuple(computed_RG[place].tolist()),
            num_nodes=line[DRAFTED],
        )
        if checked:
            end = len(request.prompt_ids) + request.max_tokens
            result.num_drafted = min(checked, max(end - known + num_tokens, 0))
            result.method = sources[place] if sources is not None else ""
        results.append(result)
    return said, results


def _commit(
    rows: RowBuffers,
    row_R: np.ndarray,
    result_RC: np.ndarray,
    requests: list[Request | None],
    writes_kv: bool,
) -> np.ndarray:
    """Write the tokens behind those known; returns how many tokens of each row have KV."""
    computed_GR = np.zeros((len(rows.computed), len(row_R)), dtype=np.int64)
    computed_GR[: None if writes_kv else 1] = result_RC[:, KNOWN] - 1
    held = [rows.requests[row] for row in row_R.tolist()]
    is_there_R = np.fromiter(map(is_, held, requests), np.bool_, len(held))
    is_there_R &= result_RC[:, TOKENS] > 0
    here: np.ndarray | slice = slice(None) if is_there_R.all() else is_there_R
    there, landed_RC = row_R[here], result_RC[here]
    known_R, counts = landed_RC[:, KNOWN], landed_RC[:, TOKENS]
    first_R = known_R - counts
    for place in range(counts.max(initial=0)):
        some = counts > place if place else slice(None)
        rows.tokens[there[some], first_R[some] + place] = landed_RC[some, FIRST + place]
    rows.known[there] = known_R
    if len(computed_GR) > 1:
        others_GR = np.maximum(computed_GR[1:, here], rows.computed[1:, there])
        computed_GR[1:, here] = others_GR
    rows.computed[:, there] = computed_GR[:, here]
    return computed_GR.T
