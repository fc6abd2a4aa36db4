"""What the packaged model is asked and made to continue, so that a drafter learns from its answers.

Templates times topics. Whatever is made of a topic in `HELD_OUT` is for validation: no drafter sees
texts about it.
"""

import itertools
import random
from typing import NamedTuple


class Prompt(NamedTuple):
    """A text to begin with: a user's message where `chat`, else continued as it is."""

    text: str
    kind: str  # "chat", "code", "editing", "structured"
    chat: bool
    held_out: bool


TOPICS = """
volcanoes; photosynthesis; the Roman Empire; the water cycle; electricity; the human heart; bees;
black holes; the French Revolution; chess; jazz music; coffee; climate change; vaccines; the moon;
dinosaurs; gravity; inflation; democracy; the printing press; whales; solar panels; sleep; yoga;
learning a language; public speaking; saving money; job interviews; time management; running;
houseplants; cooking rice; making soup; a vegetable garden; camping; bicycles; trains; bridges;
the internet; computer viruses; machine learning; databases; Python programming; sorting algorithms;
recursion; web pages; spreadsheets; robots; mobile phones; cameras; painting; poetry; Shakespeare;
fairy tales; mythology; ancient Egypt; the Silk Road; the Olympics; football; swimming; mountains;
deserts; rainforests; coral reefs; penguins; elephants; cats; dogs; birds; spiders; bacteria;
the immune system; vitamins; exercise; stress; friendship; kindness; honesty; teamwork; leadership;
small businesses; marketing; online shopping; recycling; electric cars; aeroplanes; space travel;
telescopes; atoms; chemical reactions; fractions; probability; prime numbers; triangles; statistics;
maps; earthquakes; hurricanes; rivers; glaciers; the stock market; taxes; insurance; museums;
libraries; schools; homework; holidays; birthdays; weddings; moving house; neighbours; pets;
breakfast; chocolate; tea; pizza; salads; apples; potatoes; cheese; Spain; Brazil; Canada; Egypt;
China; Kenya; Australia; Norway; Mexico; London; New York; Tokyo; Rome; the Amazon; the Sahara
"""
HELD_OUT_TOPICS = """
the northern lights; owls; the violin; pancakes; Portugal; the steam engine; knitting; magnets;
mushrooms; the Great Wall of China; dentists; sailing; fractals; the postal service; honey; Peru
"""
CHAT = (
    "What is the most important thing to know about {}?",
    "Explain {} in simple terms.",
    "Tell me about {}.",
    "Why does {} matter? Answer in one paragraph.",
    "Give me five facts about {}.",
    "Write a short story about {}.",
    "Write a poem about {}.",
    "What are the advantages and disadvantages of {}?",
    "How would you teach a ten-year-old about {}?",
    "Write an email to a friend about {}.",
    "List the steps to get started with {}.",
    "I want to learn more about {}. Where do I begin?",
    "What do people often get wrong about {}?",
    "Write three questions about {} and answer them.",
    "Summarize the history of {}.",
    "What is {}?",
    "Describe {} as if I had never heard of it.",
    "Can you help me write an introduction to an essay about {}?",
    "What is a typical day like for somebody whose work is about {}?",
    "Give me some advice concerning {}.",
)
CHAT_CODE = (
    "Write a Python function that prints a fact about {}.",
    "Write a Python class that models {}.",
    "Write a short HTML page about {}.",
    "Write a Python dictionary with data about {}, and a loop that prints it.",
    "Write a SQL query that selects entries about {} from a table.",
)
CHAT_STRUCTURED = (
    "Make a Markdown table about {} with three columns.",
    "Give me a JSON object that describes {}.",
    "Write a numbered list of ten words that have to do with {}.",
    "Make a weekly plan for {}, one line a day.",
    "Compare {} with something similar, in a bulleted list.",
)
CHAT_EDITING = (
    "Rewrite this sentence more politely: I do not want to hear about {} any more.",
    "Repeat this text exactly: Yesterday we talked about {} for two hours, and nobody was bored. "
    "Tomorrow we will meet again at noon, in the small room beside the stairs.",
    "Correct the mistakes: He dont know nothing about {}, but he like to talk of it evry day.",
    "Translate into simple English, then repeat the original: The subject of {} necessitates "
    "considerable contemplation.",
    "Change this text from past to present: She read a book about {}, made notes, and gave a talk.",
)
PLAIN = (
    ("chat", "The history of {} begins"),
    ("chat", "Most people think that {}"),
    ("chat", "A Beginner's Guide to {}\n\n"),
    ("structured", "# {}\n\n## Contents\n\n1."),
    ("structured", '{{"topic": "{}", "items": ['),
    ("structured", "| Name | Description | Year |\n|---|---|---|\n| {} |"),
    ("code", "# A program about {}\n\nimport"),
    ("code", '"""Tools for {}."""\n\n\nclass '),
    ("code", '<div class="article">\n  <h1>{}</h1>\n  <p>'),
)


def prompts(seed: int = 0) -> list[Prompt]:
    """All of them, in a random order that depends on the seed only, held-out ones among them."""
    groups = [
        (kind, True, x)
        for kind, group in (
            ("chat", CHAT),
            ("code", CHAT_CODE),
            ("structured", CHAT_STRUCTURED),
            ("editing", CHAT_EDITING),
        )
        for x in group
    ]
    groups += [(kind, False, x) for kind, x in PLAIN]
    found = []
    for topics, held_out in ((TOPICS, False), (HELD_OUT_TOPICS, True)):
        names = [" ".join(topic.split()) for topic in topics.split(";")]
        for name, (kind, chat, template) in itertools.product(names, groups):
            found.append(Prompt(template.format(name), kind, chat, held_out))
    random.Random(seed).shuffle(found)
    return found
