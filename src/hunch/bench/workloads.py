"""Prompts of our own, for the built-in bench and checks: text that is easy and hard to draft."""

from __future__ import annotations

from typing import Any

_ARTICLE = (
    "The town council of Brackwater voted on Tuesday to reopen the old railway line to the coast. "
    "The line closed thirty-one years ago when the quarry shut. Supporters say the railway will "
    "bring visitors and shorten the trip to the coast from two hours to forty minutes. Opponents "
    "say the old railway bridge is not safe and that repairing the bridge would cost more than a "
    "new road. The council will publish a safety report on the bridge in March, and the first "
    "train could run in the spring of next year if the report finds no serious faults."
)
_CODE = '''def moving_average(values, width):
    """Return the moving averages of a list."""
    result = []
    for start in range(len(values) - width + 1):
        window = values[start:start + width]
        result.append(sum(window) / width)
    return result


def moving_maximum(values, width):
    """Return the moving maxima of a list."""
'''

PROMPTS: list[dict[str, Any]] = [
    {"id": "chat-tea", "turns": ["How do I make a good cup of green tea?"]},
    {"id": "summary-railway", "turns": [f"Summarize this article in three sentences: {_ARTICLE}"]},
    {"id": "code-window", "prompt": _CODE},
    {
        "id": "rewrite-names",
        "turns": [f"Rewrite this text with 'Brackwater' changed to 'Elmhaven': {_ARTICLE}"],
    },
    {
        "id": "math-boxes",
        "turns": [
            "A shop sells pens in boxes of 12. Ana buys 7 boxes and gives away 25 pens. "
            "How many pens are left? Think step by step."
        ],
    },
    {
        "id": "list-capitals",
        "turns": ["List ten European countries with their capitals, one per line."],
    },
    {
        "id": "extract-json",
        "turns": [
            "Turn into JSON with name, age and city: Mia, 31, lives in Porto; "
            "Jon, 45, lives in Bergen; Lea, 28, lives in Ghent."
        ],
    },
    {"id": "story-lighthouse", "turns": ["Write a short story about a lighthouse keeper."]},
]
