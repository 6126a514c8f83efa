"""What a step on the device did, told to the host's rows and to the engine.

Shape letters: R rows of the step, C columns of a result, G KV groups.
"""

from __future__ import annotations

import numpy as np

from hunch.kernels.gpu_spec import CHECKED, DRAFTED, FIRST, KNOWN, REASON, TOKENS
from hunch.runner.rows import RowBuffers
from hunch.sampling.stop import REASONS
from hunch.types import Request, RowResult


def land_rows(
    rows: RowBuffers,
    ids: list[int],
    result_RC: np.ndarray,
    requests: list[Request | None],
    sources: list[str],
    *,
    writes_kv: bool,
) -> list[RowResult]:
    """Commit the rows' tokens, and say what each row got.

    `requests` sat in the rows when the step began; one that left since then changes no row, as
    another may sit there now. With `writes_kv` the drafter wrote its own KV beside the target's.
    """
    computed_RG = _commit(rows, np.array(ids), result_RC, requests, writes_kv).tolist()
    results: list[RowResult] = []
    lines = zip(ids, result_RC.tolist(), requests, computed_RG, sources, strict=True)
    for row, line, request, computed, source in lines:
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
            computed=tuple(computed),
            num_nodes=line[DRAFTED],
        )
        if checked:
            end = len(request.prompt_ids) + request.max_tokens
            result.num_drafted = min(checked, max(end - known + num_tokens, 0))
            result.method = source
        results.append(result)
    return results


def _commit(
    rows: RowBuffers,
    ids_R: np.ndarray,
    result_RC: np.ndarray,
    requests: list[Request | None],
    writes_kv: bool,
) -> np.ndarray:
    """Write the tokens behind those known; returns how many tokens of each row have KV."""
    num_R, known_R = result_RC[:, TOKENS], result_RC[:, KNOWN]
    computed_GR = np.zeros((len(rows.computed), len(ids_R)), dtype=np.int64)
    computed_GR[: None if writes_kv else 1] = known_R - 1
    held = rows.requests
    is_there_R = np.array(
        [
            request is not None and held[row] is request
            for row, request in zip(ids_R.tolist(), requests, strict=True)
        ]
    )
    is_there_R &= num_R > 0
    there, first_R = ids_R[is_there_R], (known_R - num_R)[is_there_R]
    counts, tokens = num_R[is_there_R], result_RC[is_there_R, FIRST:]
    for place in range(counts.max(initial=0)):
        some = counts > place
        rows.tokens[there[some], first_R[some] + place] = tokens[some, place]
    rows.known[there] = first_R + counts
    computed_GR[1:, is_there_R] = np.maximum(computed_GR[1:, is_there_R], rows.computed[1:, there])
    rows.computed[:, there] = computed_GR[:, is_there_R]
    return computed_GR.T
