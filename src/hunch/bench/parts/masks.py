"""The host's time for a grammar's masks, by place in the answer.

An answer of a JSON schema, a list of items with a string of at most 20 characters each, is walked
token by token, each time by a matcher of its own grammar, as one row of a step. Processor time of
one thread, so that other work of the machine does not count.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from hunch.bench.parts import PartOptions
from hunch.grammar.compile import GrammarCompiler
from hunch.hub import resolve
from hunch.text.tokenizer import Tokenizer, load_tokenizer
from hunch.types import StructuredOutput

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "price": {"type": "integer"},
        "in_stock": {"type": "boolean"},
    },
    "required": ["name", "price", "in_stock"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "minItems": 24, "items": ITEM}
NAMES = ("copper kettle", "oak table", "sail of linen", "clock without hands")
STRING, REST = "in a string of at most 20", "elsewhere"


def answer(num_items: int) -> tuple[str, set[int]]:
    """A text that the schema allows, and the places of its characters inside of names."""
    text, inside = "[", set()
    for number in range(num_items):
        name = NAMES[number % len(NAMES)]
        text += (", " if number else "") + '{"name": "'
        inside |= set(range(len(text), len(text) + len(name)))
        rest = json.dumps({"price": 13 * number + 7, "in_stock": number % 2 == 0})
        text += f'{name}", {rest[1:]}'
    return text, inside


def walk(tokenizer: Tokenizer, num_items: int) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of masks and of consuming a token, by where the token stands."""
    text, inside = answer(num_items)
    matcher = GrammarCompiler(tokenizer)(StructuredOutput(json=SCHEMA)).matcher()
    mask_1W = np.zeros((1, (tokenizer.vocab_size + 31) // 32), np.int32)
    found: dict[str, tuple[list[float], list[float]]] = {STRING: ([], []), REST: ([], [])}
    place = 0
    for token in tokenizer.encode(text, add_special_tokens=False):
        masks, tokens = found[STRING if place in inside else REST]
        mask_1W[:] = 0
        began = time.thread_time()
        matcher.fill([], [], mask_1W)
        filled = time.thread_time()
        taken = matcher.consume([token])
        tokens.append(time.thread_time() - filled)
        masks.append(filled - began)
        assert taken == 1, f"the grammar refuses {tokenizer.decode([token])!r} after {text[:place]}"
        place += len(tokenizer.token_bytes(token))
    return found


def main(words: Sequence[str] = ()) -> None:
    options = PartOptions("masks", __doc__)
    options.add_argument("--model", default="smollm2-135m", help="whose vocabulary is masked")
    options.add_argument("--items", type=int, default=8, help="of the list")
    given = options.parse_args(words)
    tokenizer = load_tokenizer(resolve(given.model).path)
    print(f"{tokenizer.vocab_size:,} tokens; microseconds of one thread\n")
    print("| where | masks | median | P95 | most | a token consumed, median |")
    print("|---|---|---|---|---|---|")
    for where, (masks, tokens) in walk(tokenizer, given.items).items():
        late = sorted(masks)[int(0.95 * (len(masks) - 1))]
        times = (median(masks), late, max(masks), median(tokens))
        figures = " | ".join(f"{1e6 * seconds:.0f}" for seconds in times)
        print(f"| {where} | {len(masks)} | {figures} |")
