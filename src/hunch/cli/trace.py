"""What speculation did, for eyes: guesses kept, guesses struck out, the target's own word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from hunch.text.tokenizer import Tokenizer
    from hunch.types import CompletionOutput

ACCEPTED, REJECTED, TARGET = "green", "red strike", "bold"


def show_trace(tokenizer: Tokenizer, answer: CompletionOutput) -> None:
    """One line per step: accepted guesses, rejected ones struck out, then the target's token.

    Where there are no colours, brackets say the same.
    """
    console = Console(highlight=False)
    kept, dropped = "{}", "{}"
    if console.no_color or console.color_system is None:
        kept, dropped = "[{}]", "(-{}-)"
    position = 0
    for number, step in enumerate(answer.trace or [], 1):
        line = Text().append(f"{number:4d}  ", style="dim")
        accepted = set(step.accepted)
        for node in step.accepted:
            line.append(kept.format(_show(tokenizer, step.tokens[node])), style=ACCEPTED)
        for node, token in enumerate(step.tokens):
            if node not in accepted:
                line.append(dropped.format(_show(tokenizer, token)), style=REJECTED)
        position += len(step.accepted)
        if position < len(answer.token_ids):
            line.append(_show(tokenizer, answer.token_ids[position]), style=TARGET)
        position += 1
        console.print(line)
    key = Text("\n      ")
    words = (kept.format("accepted"), ACCEPTED), (dropped.format("rejected"), REJECTED)
    for word, style in (*words, ("the target's", TARGET)):
        key.append(word, style=style).append("  ")
    console.print(key)


def _show(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_text(token).replace("\n", "\u23ce")


def show_stats(stats: dict[str, Any]) -> None:
    """One line of figures under an answer, on stderr so that the text can be piped."""
    passes = "1 pass" if stats["steps"] == 1 else f"{stats['steps']} passes"
    most = stats.get("max_tokens_per_pass") or 1.0  # older servers do not say
    of_most = f" of at most {most:.2f}" if most > 1 else ""
    guesses = f"{stats['accepted']} of {stats['drafted']} guesses accepted"
    Console(stderr=True, highlight=False).print(
        f"[dim]{stats['tokens_per_second']:.1f} tok/s, {passes}, "
        f"{stats['tokens_per_pass']:.2f} tokens per pass{of_most}, "
        f"{guesses if stats['drafted'] else 'nothing guessed'}[/dim]"
    )
