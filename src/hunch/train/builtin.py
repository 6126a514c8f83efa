"""A few thousand plain requests for those who bring none of their own: made from parts, by rule."""

from __future__ import annotations

import random

_SUBJECTS = (
    "tea", "the moon", "bicycles", "volcanoes", "honey bees", "the Roman empire", "chess", "bread",
    "whales", "electric cars", "the piano", "glaciers", "vaccines", "maps", "coffee", "owls",
    "the internet", "photosynthesis", "rivers", "paper", "the stock market", "bridges", "sleep",
    "solar power", "the printing press", "football", "dinosaurs", "recycling", "the heart",
    "clocks", "gardens", "databases", "earthquakes", "cheese", "trains", "the alphabet", "deserts",
    "robots", "poetry", "lighthouses", "salt", "the violin", "antibiotics", "spiders", "wind",
    "medieval castles", "swimming", "black holes", "rice", "elections", "batteries", "libraries",
    "penguins", "the Silk Road", "jazz", "cement", "gravity", "tomatoes", "satellites", "tax",
    "origami", "mosquitoes", "the Olympic games", "glass", "sailing", "memory", "insurance",
    "mushrooms", "ancient Egypt", "cameras", "running shoes", "the nervous system", "inflation",
    "wolves", "opera", "plastic", "rainbows", "hospitals", "cryptography", "wool", "airports",
    "evolution", "chocolate", "hurricanes", "the telescope", "unions", "knots", "coral reefs",
    "passwords", "yoga", "copper", "the theatre", "compilers", "horses", "museums", "lightning",
    "translation", "elevators", "bacteria", "diplomacy", "pottery", "search engines", "olives",
)  # fmt: skip
TASKS = (
    "Explain {} to a child.",
    "What are three facts about {}?",
    "Write a short story about {}.",
    "Write a list of ten words about {}, one per line.",
    "Summarize what matters most about {} in two sentences.",
    "Write an email that invites a friend to a talk about {}.",
    "Compare {} today with a hundred years ago.",
    "What are common misunderstandings about {}?",
    "Give me a table with four rows about {}: name, year, why it matters.",
    "I have five minutes. What should I know about {}?",
    "Write a quiz of three questions about {} with the answers.",
    "What would the world be like without {}?",
    "Write a poem of two stanzas about {}.",
    "List the advantages and the disadvantages of {}.",
    "Write an introduction to an essay about {}.",
    "How would you teach a class about {}? Give a plan in steps.",
    "Who should I ask when I want to learn more about {}, and why?",
    "Write a dialogue between two people who disagree about {}.",
    "Answer as JSON with the keys title, summary and tags: what is there to say about {}?",
)
_FUNCTIONS = (
    "checks whether a text is a palindrome", "returns the n-th Fibonacci number",
    "counts the words of a file", "merges two sorted lists", "finds the largest prime below n",
    "removes duplicates from a list and keeps the order", "reverses a linked list",
    "parses a date written as YYYY-MM-DD", "computes the median of numbers",
    "groups records by a key", "flattens nested lists", "rounds a price to two decimals",
    "validates an email address", "sorts names by their last word", "transposes a matrix",
    "computes the greatest common divisor", "retries a call three times with a pause",
    "converts Celsius to Fahrenheit", "finds anagrams in a list of words", "reads a CSV file",
    "balances brackets in a text", "draws a triangle of stars", "caches results of a function",
    "searches a sorted list", "counts the days between two dates", "splits a list in chunks",
    "computes compound interest", "shuffles cards and deals five", "compresses repeated letters",
    "walks a directory and sums the file sizes",
)  # fmt: skip
_CODE = (
    "Write a Python function that {}.",
    "Write a Python function that {}, with type hints, a docstring and two tests.",
    "Write a JavaScript function that {}.",
    "Here is my plan: a function that {}. Which edge cases must I think of?",
    "Write a small C++ program that {}, and explain it line by line.",
    "Write an SQL query or a shell command that {}, if that can be done.",
)
_NAMES = ("Ana", "Ben", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana", "Ivan", "Jana")
_GOODS = ("apples", "books", "tickets", "pencils", "eggs", "bricks", "shirts", "coins")
_MATHS = (
    "{a} has {x} {goods} and buys {y} more each day. How many are there after {z} days?",
    "{a} shares {x} {goods} with {b} and {c}. How many does each get, and how many are left?",
    "A train goes {x} km in {z} hours. How far does it go in {y} minutes?",
    "{a} pays {x} euros for {z} {goods}. What do {y} of them cost?",
    "What is {x} * {y} - {z}? Show each step.",
    "{a} is {z} years older than {b}; together they are {x}. How old is each?",
    "Solve for n: {z}n + {y} = {x}. Explain every step.",
    "{a} has {x} {goods}. {b} has {y} more than {a}, and {c} has half as many as {b}. How many "
    "{goods} do they have together?",
    "A box holds {z} {goods}. How many boxes does {a} need for {x} {goods}, and how many {goods} "
    "are in the last one?",
    "{a} earns {y} euros an hour and works {z} hours a day. After how many days has {a} earned "
    "{x} euros?",
    "In a class of {x} children {y}% play chess and {z} play the violin. How many play chess?",
    "{a} buys {z} {goods} for {y} euros each and pays with {x} euros. How much change is there?",
    "The price of {goods} rose from {y} to {x} euros. By how many percent is that?",
    "{a} reads {y} pages a day, and {b} reads {z} pages more. Who finishes a book of {x} pages "
    "first, and how many days earlier?",
)
_SENTENCES = (
    "The meeting was moved from Tuesday to Thursday because the room is being painted.",
    "Our new shop in the harbour opens on the first of May with music and free coffee.",
    "Although it rained all week, the harvest was the best in ten years, farmers say.",
    "The update removes an error that deleted drafts when two windows were open.",
    "She left the city at dawn, took the last seat of the bus and slept until the border.",
    "Prices rose by three percent in March, less than in the two months before.",
    "The museum lends forty paintings to schools so that children can study them up close.",
    "He promised to repair the roof, but the ladder had been sold years ago.",
)
_REWRITES = (
    "Translate into French: {}",
    "Translate into German: {}",
    "Rewrite this in a formal tone: {}",
    "Correct the grammar and say what you changed: {}",
    "Write three headlines for this: {}",
    "Which facts does this sentence state? Answer with a list. {}",
    "Continue this as a news report of four sentences: {}",
    "Repeat this sentence word by word, then ask two questions about it: {}",
)


def builtin_prompts() -> list[str]:
    """About three thousand, the same every time."""
    found = [task.format(subject) for subject in _SUBJECTS for task in TASKS]
    found += [code.format(function) for function in _FUNCTIONS for code in _CODE]
    found += [rewrite.format(text) for text in _SENTENCES for rewrite in _REWRITES]
    return found + sums(700, random.Random(7))


def sums(count: int, chance: random.Random) -> list[str]:
    """Sums in words, with other names and numbers each time."""
    found = []
    for number in range(count):
        a, b, c = chance.sample(_NAMES, 3)
        x, y, z = chance.randint(40, 400), chance.randint(3, 39), chance.randint(2, 9)
        numbers = {"a": a, "b": b, "c": c, "x": x, "y": y, "z": z}
        text = _MATHS[number % len(_MATHS)]
        found.append(text.format(goods=chance.choice(_GOODS), **numbers))
    return found
