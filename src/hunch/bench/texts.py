"""Texts of our own that the built-in workloads are made of."""

from __future__ import annotations

RAILWAY = (
    "The town council of Brackwater voted on Tuesday to reopen the old railway line to the coast. "
    "The line closed thirty-one years ago when the quarry shut. Supporters say the railway will "
    "bring visitors and shorten the trip to the coast from two hours to forty minutes. Opponents "
    "say the old railway bridge is not safe and that repairing the bridge would cost more than a "
    "new road. The council will publish a safety report on the bridge in March, and the first "
    "train could run in the spring of next year if the report finds no serious faults."
)
HARBOUR = (
    "Fishers in the harbour of Port Ellery have begun to sell their catch from a shared cold store "
    "instead of through the regional auction. The store belongs to the fishers themselves: each of "
    "the nineteen boats paid for one share, and every share has one vote. In its first season the "
    "store sold forty tonnes of hake and squid, mostly to restaurants within a day's drive. Prices "
    "were a fifth higher than at the auction, and less fish was thrown away, because boats now ask "
    "what is wanted before they leave. The auction house says that it will lower its fees. The "
    "fishers want to use the profit of the first year to buy a second ice machine."
)
OBSERVATORY = (
    "The observatory on Mount Calder will open its largest telescope to schools for ten nights a "
    "year. Pupils will choose what to look at, point the telescope from their classrooms and keep "
    "the pictures. The idea came from a night watchman who noticed that the telescope stood idle "
    "whenever thin clouds made its usual work impossible. Thin clouds spoil measurements of faint "
    "galaxies but hardly matter for the Moon, for planets and for bright star clusters. "
    "Astronomers first feared that pupils might damage the instrument, so the software now refuses "
    "any command that would move the mirror too fast or too near the Sun."
)
ORCHARD = (
    "A farm near Lindow has replaced half of its apple trees with a mixture of forty old "
    "varieties. Its owner, Teresa Vahl, lost most of a harvest four years ago when a late frost "
    "met a single variety that flowers early. The old trees flower over five weeks, so no frost "
    "can take them all. Picking takes longer, as the apples ripen at different times, and shops "
    "dislike apples of uneven size. Vahl sells most of them as juice instead, each bottle with the "
    "names of its varieties on the label. She says that the farm earns a little less in a good "
    "year than before, and a great deal more in a bad one."
)
LIBRARY = (
    "The public library of Eastmere lends tools as well as books. Anyone with a library card may "
    "take home a drill, a sewing machine or a ladder for a week. The library bought two hundred "
    "tools with money that had been set aside for a new reading room. Librarians were doubtful at "
    "first, but visits have risen by a third, and most people who come for a tool leave with a "
    "book. Damage has been rare. A group of retired mechanics checks every tool when it comes "
    "back, and on Saturdays they show people how to mend what they own."
)
ARTICLES = {
    "railway": RAILWAY,
    "harbour": HARBOUR,
    "observatory": OBSERVATORY,
    "orchard": ORCHARD,
    "library": LIBRARY,
}

WINDOW_CODE = '''def moving_average(values, width):
    """Return the moving averages of a list."""
    result = []
    for start in range(len(values) - width + 1):
        window = values[start:start + width]
        result.append(sum(window) / width)
    return result


def moving_maximum(values, width):
    """Return the moving maxima of a list."""
'''
STACK_CODE = '''class Stack:
    """The last item put on it comes off first."""

    def __init__(self):
        self._items = []

    def push(self, item):
        self._items.append(item)

    def pop(self):
        if not self._items:
            raise IndexError("the stack is empty")
        return self._items.pop()


class Queue:
    """The first item put in comes out first."""

'''
PARSE_CODE = '''import csv
from pathlib import Path


def read_orders(path: Path) -> list[dict[str, str]]:
    """Orders from a CSV file with the columns id, customer, amount and date."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def total_by_customer(orders: list[dict[str, str]]) -> dict[str, float]:
    """What each customer ordered in all."""
'''
SQL_CODE = """-- Customers with the number of their orders.
SELECT customers.name, COUNT(orders.id) AS num_orders
FROM customers
LEFT JOIN orders ON orders.customer_id = customers.id
GROUP BY customers.name
ORDER BY num_orders DESC;

-- Products with the number of times they were ordered.
SELECT"""
CODE = {
    "window": WINDOW_CODE,
    "stack": STACK_CODE,
    "orders": PARSE_CODE,
    "sql": SQL_CODE,
}

CHAT = {
    "tea": "How do I make a good cup of green tea?",
    "lighthouse": "Write a short story about a lighthouse keeper.",
    "capitals": "List ten European countries with their capitals, one per line.",
    "interview": "I have a job interview tomorrow and I am nervous. What can I do tonight?",
    "rainbow": "Explain to a child why a rainbow is curved.",
    "garden": "Which vegetables can I grow on a small balcony that gets sun only in the morning?",
    "letter": "Write a polite letter to a neighbour whose dog barks all night.",
    "bicycle": "What should I check before I buy a used bicycle?",
}

MATHEMATICS = {
    "boxes": "A shop sells pens in boxes of 12. Ana buys 7 boxes and gives away 25 pens. "
    "How many pens are left?",
    "train": "A train leaves at 9:40 and travels 210 km at 84 km per hour. When does it arrive?",
    "garden": "A rectangular garden is 18 m long and 11 m wide. A path of 1 m runs around it on "
    "the outside. What is the area of the path?",
    "savings": "Ben saves 35 coins in the first week and 5 more in every week than in the one "
    "before. How many has he saved after 6 weeks?",
    "mixture": "How much water must be added to 4 litres of juice with 30% sugar to get 20%?",
    "dice": "Two dice are thrown. What is the chance that their sum is 9 or more?",
}
THINK = " Think step by step and give the result in the last line."

QUESTIONS = {
    "railway": "When did the old line close, and why?",
    "harbour": "How many boats own the cold store, and how are votes counted?",
    "observatory": "Why does the software refuse some commands?",
    "orchard": "Why do the old trees not lose their whole harvest to frost?",
}

JSON_TASKS = {
    "people": "Mia, 31, lives in Porto; Jon, 45, lives in Bergen; Lea, 28, lives in Ghent.",
    "harbour": HARBOUR,
    "orchard": ORCHARD,
}
PEOPLE_SCHEMA = {
    "type": "array",
    "minItems": 3,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer"},
            "city": {"type": "string", "maxLength": 20},
        },
        "required": ["name", "age", "city"],
        "additionalProperties": False,
    },
}
SUMMARY_SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "place": {"type": "string", "maxLength": 30},
        "numbers": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
        "summary": {"type": "string", "maxLength": 160},
    },
    "required": ["title", "place", "numbers", "summary"],
    "additionalProperties": False,
}

RENAMES = {
    "railway": ("Brackwater", "Elmhaven"),
    "harbour": ("Port Ellery", "Sandrock Bay"),
    "observatory": ("Mount Calder", "Mount Hallow"),
    "library": ("Eastmere", "Northam"),
}

ASSISTANT = (
    "You are the assistant of a town's office for questions from the public. Answer in at most "
    "four sentences. The office is open on weekdays from eight to four, on Thursdays until six. "
    "Passports take three weeks and cost 80; a lost one must be reported to the police first. "
    "Parking permits are given to residents only, one per household, for 120 a year. The market is "
    "on Wednesdays and Saturdays; stalls are booked two weeks ahead. Noise after ten in the "
    "evening is reported by telephone. Building a garden shed of up to twelve square metres needs "
    "no permit, a fence higher than two metres does. Dogs must be registered within a month."
)
DIALOGUES = {
    "passport": (
        ("How long does a new passport take?", "A new passport takes three weeks and costs 80."),
        ("I lost my old one. Does that change anything?", "Yes. Report it to the police first, and "
         "bring their receipt when you apply."),
        ("When can I come by after work?", ""),
    ),
    "shed": (
        ("May I build a shed in my garden?", "A shed of up to twelve square metres needs no "
         "permit. A larger one does."),
        ("And a fence?", "A fence of up to two metres needs no permit."),
        ("Write down what I may build without a permit, as a list.", ""),
    ),
    "market": (
        ("I want to sell honey. How do I get a stall?", "The market is on Wednesdays and "
         "Saturdays. Stalls are booked two weeks ahead."),
        ("Can I park my van there?", ""),
    ),
}  # fmt: skip

WORDS = (
    "river", "stone", "window", "paper", "garden", "winter", "engine", "letter", "bridge",
    "candle", "forest", "silver", "market", "shadow", "ladder", "button", "island", "pepper",
    "rocket", "velvet", "anchor", "basket", "cellar", "dragon", "emerald", "feather", "glacier",
    "hammer", "iron", "jungle", "kettle", "lantern", "mirror", "needle", "orange", "pocket",
    "quartz", "ribbon", "saddle", "thunder", "umbrella", "village", "whistle", "yellow", "zebra",
    "autumn", "bottle", "copper", "desert", "echo",
)  # fmt: skip
PLACES = ("Alder", "Birch", "Cedar", "Dorn", "Elm", "Fern", "Gorse", "Hazel", "Iris", "Juniper")
GOODS = ("barley", "copper", "linen", "salt", "timber", "wool", "honey", "glass", "oats", "slate")
