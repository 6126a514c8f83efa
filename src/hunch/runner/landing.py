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
    computed_GR = np.zeros((len(rows.computed), len(ids_R)), dtype=np.int64)
    computed_GR[: None if writes_kv else 1] = result_RC[:, KNOWN] - 1
    held = rows.requests
    is_there = [
        request is not None and held[row] is request and num_tokens > 0
        for row, request, num_tokens in zip(
            ids_R.tolist(), requests, result_RC[:, TOKENS].tolist(), strict=True
        )
    ]
    here: np.ndarray | slice = slice(None) if all(is_there) else np.array(is_there)
    there, landed_RC = ids_R[here], result_RC[here]
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
