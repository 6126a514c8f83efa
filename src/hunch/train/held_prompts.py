"""Prompts that nobody learns from, for those who bring none of their own: a drafter is tried on
them, and what they promise is what strangers can expect.

Prompts that are made by the rules of those which were learned promise too much. These are written
one by one, worded in other ways, about texts that no target wrote, and their categories have the
shares that a server for everybody may see.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_FERRY = (
    "The night ferry between the two islands will stop at the end of the summer. The company that "
    "has run it since 1974 says that it lost 2.3 million crowns last year, as most passengers now "
    "fly and the lorries take the new bridge in the north. The island council asked for a subsidy "
    "in March and was told in June that there would be none. Around ninety people work on the "
    "ship and in the two harbours; the company has offered places on its other routes to about "
    "half of them. Fishermen on the smaller island, who send their catch to the morning market by "
    "the ferry, say that they will have to sell to a single buyer with a cold store. The mayor, "
    "Ingrid Halvorsen, called the decision a mistake that will be understood only in winter, when "
    "fog closes the airport for days. A group of residents has begun to collect money for a "
    "smaller boat, and says that it has a third of what it needs."
)
_KILN = (
    "To fire a kiln of this size, open the damper fully and light the burner at its lowest "
    "setting. Leave the lid propped for the first two hours, so that water in the clay can leave "
    "as steam; work that is more than a finger thick needs three. Close the lid at 200 degrees. "
    "From there the temperature may rise by 100 degrees an hour up to 600, where quartz changes "
    "its form and a fast rise cracks pots that looked sound. Above 600 degrees go as fast as the "
    "burner allows. Watch the cones through the spy hole from 1,150 degrees on: the first bends "
    "about twenty minutes before the second, and when the second touches the shelf the firing is "
    "done. Turn off the gas, close the damper, and do not open the lid before the kiln is below "
    "120 degrees, however long that takes. Note the weather, the gas used and the time of each "
    "cone: the next firing will be easier."
)
_BEES = (
    "A colony of honey bees keeps the middle of its winter cluster at about 35 degrees while it "
    "raises brood and lets it fall to 20 when it does not. Bees at the edge face inwards and hold "
    "still; those inside uncouple their wings and work their flight muscles to make heat. Every "
    "few hours they change places. A cluster of ten thousand bees eats some eight kilograms of "
    "honey between November and March, most of it after the first eggs are laid in February. "
    "Colonies rarely freeze; they starve, often with honey a hand's breadth away, because the "
    "cluster cannot move over an empty comb in the cold. Damp is the other danger: water "
    "condenses under a cold lid and drips onto the bees. Many keepers therefore insulate the lid "
    "and leave the floor open, which looks wrong and works."
)
_MINUTES = (
    "Present: Osei, Brandt, Lindqvist, Rao. Osei reported that the new depot in Tamale will open "
    "on 14 October instead of 1 September, as the cooling units came without compressors; the "
    "supplier pays for the delay, 4,200 dollars a week. Rao asked whether vaccines could be "
    "stored at the hospital until then. Brandt has spoken with the hospital: it has room for "
    "60,000 doses, not for the 85,000 that are planned. Decided: the second delivery is moved to "
    "November. Lindqvist presented the drivers' hours. Three of eleven drivers were over the "
    "limit in July, all on the northern route; a twelfth driver would cost 780 dollars a month. "
    "Decided: to hire one for six months. Rao will write the notice by Friday. Next meeting: 3 "
    "September, by telephone, as Osei travels."
)
_REVIEW = (
    "I bought this tent for a walk of nine days along the coast and used it in everything from "
    "dead calm to a storm that tore branches off. It goes up in four minutes once you know that "
    "the red pole comes last, which the leaflet does not say. The floor is dry, the zips run "
    "smoothly, and two people can sit up in it. What I did not like: the pegs bend if you look at "
    "them, the inner pocket hangs where your head is, and in warm nights water runs down the "
    "inside of the roof unless both vents are tied back with string, for which there is no loop. "
    "At 2.1 kilograms it is no light tent either. The seller answered within a day and sent "
    "better pegs for nothing. Four stars, five with other pegs."
)
_ORCHARD = (
    "Die alten Obstwiesen am Rand der Stadt werden in diesem Herbst zum ersten Mal seit zwanzig "
    "Jahren wieder gemeinsam geerntet. Der Verein hat hundert Körbe gekauft und eine Presse "
    "gemietet, die an drei Samstagen auf dem Marktplatz steht."
)
_MARKET = (
    "Le marché couvert rouvrira ses portes samedi après deux ans de travaux. Les étals de poisson "
    "ont été déplacés vers l'entrée du port, et une partie du toit laisse maintenant passer la "
    "lumière du jour."
)


class Held(NamedTuple):
    """What is asked for, and a user's turns with the answers between them."""

    category: str
    turns: tuple[str, ...]

    def messages(self) -> list[dict[str, Any]]:
        roles = ("user", "assistant")
        return [{"role": roles[n % 2], "content": text} for n, text in enumerate(self.turns)]


_QUESTIONS = (
    "My landlord wants to keep the deposit because of a scratch in the floor. What can I do?",
    "Is it true that hot water freezes faster than cold water?",
    "I want to run ten kilometres in spring and have never run before. How do I begin?",
    "Which is better for a small flat, a heat pump or district heating?",
    "How did people keep meat through the winter before there were refrigerators?",
    "Plan a weekend in Lisbon for two people who like music and do not like crowds.",
    "What happens in my body when I hold my breath?",
    "Draft a polite message to a colleague who keeps interrupting me in meetings.",
)
_CODE = (
    "In Python, read lines like `2024-03-01,login,anna` from a file and print how many different "
    "users logged in on each day.",
    "Why does this raise an error?\n\n```python\ndef add(item, items=[]):\n    items.append(item)\n"
    "    return items[1]\n\nprint(add(3))\n```",
    "Implement a thread-safe queue with a maximum size in Go, and show how it is used.",
    "def longest_run(values: list[int]) -> int:\n"
    '    """Length of the longest run of equal neighbours.\n'
    '    >>> longest_run([1, 1, 2, 2, 2, 3])\n    3\n    """\n\nComplete this function.',
)
_SUMS = (
    "Marta bakes 48 rolls in the morning and half as many after lunch. She sells three quarters of "
    "all of them at 1.20 each and gives the rest away. How much does she take in?",
    "A tank is filled by one pipe in 6 hours and by another in 4. Both are opened, and after one "
    "hour the slower one is shut. How long does it take in all?",
    "If f(x) = 3x^2 - 5x + 2, for which x is f(x) = 0? Show the work.",
)
_CHATS = (
    (
        "Recommend three board games for a family with children of six and ten.",
        "1. Carcassonne: players lay tiles and build towns and roads; 40 minutes.\n2. Dixit: one "
        "tells a riddle about a picture, the others guess which it is; 30 minutes.\n3. Labyrinth: "
        "the maze moves with every turn; 20 minutes.",
        "We have the first one already. Which of the others would you take on a train, and why?",
    ),
    (
        "What is the difference between a virus and a bacterium?",
        "A bacterium is a living cell that feeds and divides by itself. A virus is genetic "
        "material in a coat of protein; it multiplies only inside the cells of others.",
        "So why do antibiotics work against one and not the other? My daughter is twelve and asked "
        "me.",
    ),
    (
        "Write a slogan for a repair shop for bicycles.",
        "Back on the road by tonight.",
        "Too short for our window. Write four more, two of them with a rhyme.",
    ),
)


def held_prompts() -> list[Held]:
    """All of them, so that the first ones of any number have some of every category."""
    long = "\n\n".join((_FERRY, _KILN, _BEES))
    notes = "\n\n".join((_MINUTES, _REVIEW, _BEES))
    groups = [
        [Held("question", (text,)) for text in _QUESTIONS],
        [Held("code", (text,)) for text in _CODE],
        [Held("sum", (text,)) for text in _SUMS],
        [Held("chat", turns) for turns in _CHATS],
        [
            Held("summary", (f"Give me the gist of this article, please.\n\n{_FERRY}",)),
            Held("summary", (f"{_REVIEW}\n\nSum up this review for a shop's website.",)),
            Held("summary", (f"What was decided, and who does what?\n\n{_MINUTES}",)),
        ],
        [
            Held("translation", (f"Please put this into English. {_ORCHARD}",)),
            Held("translation", (f"English version, please: {_MARKET}",)),
            Held("translation", ("I need this in German: " + _BEES.split(". ")[1] + ".",)),
        ],
        [
            Held("documents", (f"{long}\n\nAbove what temperature may I heat quickly, and why?",)),
            Held("documents", (f"Read these notes.\n\n{notes}\n\nHow many doses find no room?",)),
            Held("documents", (f"{long}\n\nWhy do colonies starve beside their honey?",)),
        ],
    ]
    places = [
        ((at + 0.5) / len(group), number, held)
        for number, group in enumerate(groups)
        for at, held in enumerate(group)
    ]
    return [held for *_, held in sorted(places)]
