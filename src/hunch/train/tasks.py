"""Wordings of tasks that prompts are made of: about words, about texts, between languages.

None of them is among the held-out prompts (`held_prompts`), which are worded in other ways.
"""

from __future__ import annotations

from hunch.train.builtin import TASKS

OF_WORDS = (
    *TASKS,
    "What is {}?",
    "Who or what was {}, and what is known about it?",
    "How does {} work?",
    "Why do people talk about {}?",
    "When did {} begin, and where?",
    "Define {} and use it in three sentences.",
    "What is the connection between {} and {}?",
    "Write a paragraph with the words {}, {} and {} in it.",
    "Translate these words into Spanish, French and German: {}, {}, {}.",
    "Write a news report about {} and {}.",
    "Write a Python class for {} with methods for {} and {}.",
    "Write a function that sorts {} by {}, in a programming language of your choice.",
    "Tell me a joke about {}.",
    "How do I combine {} with {}? Give me instructions, step by step.",
    "You are an expert on {}. A customer asks you about {}. What do you answer?",
    "Write a review of a book that is called {}.",
    "Describe {} in one sentence, then in a whole paragraph.",
)
OF_TEXTS = (
    "Summarize this text in two sentences:\n\n{text}",
    "Summarize: {text}",
    "{text}\n\nTL;DR:",
    "What is the main point of this text?\n\n{text}",
    "Answer with what the text says, and nothing else.\n\nText: {text}\n\n"
    "Question: what does it say about {word}?",
    "List the names, places and numbers in this text:\n\n{text}",
    "Write a title and three tags for this text:\n\n{text}",
    "Correct the mistakes in this text, and change nothing else:\n\n{text}",
    "Rewrite this for a newspaper:\n\n{text}",
    "Write three questions that this text answers, with their answers:\n\n{text}",
    "Continue this text:\n\n{text}",
    "Do you agree with this, and why?\n\n{text}",
)
# {text} is several texts, one after the other.
OF_DOCUMENTS = (
    "Summarize: {text}",
    "Summarize the following in three or four sentences.\n\n{text}",
    "{text}\n\nSummary:",
    "Write the highlights of this article, one sentence each:\n\n{text}",
    "{text}\n\nQuestion: what does this say about {word}?\nAnswer:",
    "Answer the question from these passages, and say so if they do not tell.\n\n{text}\n\n"
    "Question: how is {word} mentioned, and why?",
    "Use the following pieces of context to answer the question at the end.\n\n{text}\n\n"
    "Question: what is said about {word} and {other}?",
    "Here are some documents.\n\n{text}\n\nWith these documents, answer: what is {word}?",
    "Context: {text}\n\nWho or what is {word}? Answer in one or two sentences.",
    "{text}\n\nList every fact about {word} that is stated above.",
    "Extract names, dates, places and numbers from this as JSON:\n\n{text}",
    "Which parts of the following contradict each other, if any?\n\n{text}",
    "Rewrite this so that it is half as long:\n\n{text}",
    "{text}\n\nContinue from here.",
)
FOLLOW_UPS = (
    "Can you give an example?",
    "Explain that in simpler words.",
    "Why is that so?",
    "Make it shorter.",
    "Rewrite your answer as a list.",
    "Is there anything you left out?",
    "Now do the same for {word}.",
    "What about {word}? How does it fit in?",
    "Are you sure? Check it step by step.",
    "Rewrite it in a friendlier tone.",
    "What would someone say who disagrees with you?",
    "Write a title for your answer, and a closing sentence.",
    "Take the second point and explain it in more detail.",
    "Thank you. What should I read or try next?",
)
# Words that are in every text of a language; one whose words are no tokens of the vocabulary is
# not asked for.
LANGUAGES = {
    "German": ("und", "nicht", "eine", "werden"),
    "French": ("dans", "avec", "pour", "sont"),
    "Spanish": ("para", "como", "los", "una"),
    "Italian": ("della", "sono", "che", "anche"),
    "Portuguese": ("não", "uma", "para", "mais"),
    "Dutch": ("een", "niet", "voor", "worden"),
    "Polish": ("nie", "jest", "się", "przez"),
    "Russian": ("что", "как", "это", "для"),
    "Chinese": ("的", "我们", "可以", "这个"),
    "Japanese": ("です", "から", "こと", "ます"),
    "Turkish": ("bir", "için", "olarak", "daha"),
}
IN_LANGUAGE = (
    "Write a short news report in {language} about {word}.",
    "Write three paragraphs about {word}, in {language}.",
    "Tell me a short story about {word} in {language}.",
)
INTO_LANGUAGE = (
    "Translate into {language}: {text}",
    "Translate English to {language}: {text}",
    "Translate the following text into {language}, and write nothing else.\n\n{text}",
    "How do you say this in {language}?\n\n{text}",
)
FROM_LANGUAGE = (
    "Translate {language} to English: {text}",
    "Translate into English: {text}",
    "Translate this {language} text to English, and write nothing else.\n\n{text}",
    "What does this mean in English?\n\n{text}",
    "Summarize in English what this says: {text}",
)
