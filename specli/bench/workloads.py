"""Prompts to measure on: eight kinds of everyday work, written for this project, or a file of the user's own.

Speculation pays where the next words can be foreseen, so one kind of text says nothing about another. Rewriting,
summarising and extraction copy from their input, which is what n-gram drafting lives on; stories copy from nowhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specli.errors import ConfigError

OWN = "own"  # the workload of prompts from a file that names none


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. ``name`` is unique: the workload and a number, as ``code 3``."""

    workload: str
    name: str
    text: str
    system: str | None = None


_CHAT = (
    "I just moved to a small town where I know nobody. How can I meet people without it feeling forced?",
    "What should I look for when I buy a second-hand bicycle?",
    "Explain to a ten-year-old why the moon seems to change its shape.",
    "My bread always comes out dense. What could be the reasons?",
    "What are the main differences between cats and dogs as pets?",
    "I have a job interview tomorrow and cannot sleep. Give me some advice.",
    "Which houseplants survive in a dark hallway, and how often do they need water?",
    "How does a dishwasher clean plates without scrubbing them?",
    "Plan a quiet Sunday for two people who like walking and old books.",
)
_CODE = (
    "Write a Python function that checks whether a text is a palindrome, ignoring case and punctuation.",
    "Write a Python class for a bank account with deposit, withdraw and a history of transactions.",
    "Write a Python function that merges two sorted lists into one sorted list without using sort.",
    "Write a JavaScript function that groups an array of orders by customer and sums their totals.",
    "Write a Python program that counts the words of a file and prints the ten most frequent ones.",
    "Write a SQL query that lists each department with its number of employees and their average salary.",
    "Write a Python function that converts Roman numerals to integers, with three assertions that test it.",
    "Write a C function that reverses a singly linked list, and the struct it needs.",
    "Write a Python generator that yields the prime numbers below n by the sieve of Eratosthenes.",
)
_INVOICE = """def invoice_total(lines, discount):
    total = 0
    for line in lines:
        total = total + line.quantity * line.unit_price
    if discount > 0:
        total = total - total * discount
    return total
"""
_STACK = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def size(self):
        return len(self.items)
"""
_READINGS = """def load_readings(path):
    readings = []
    file = open(path)
    for row in file:
        parts = row.split(",")
        readings.append((parts[0], float(parts[1])))
    file.close()
    return readings
"""
_SERVER = """function startServer(port) {
  var server = http.createServer(function (request, response) {
    response.writeHead(200);
    response.end("ready");
  });
  server.listen(port);
  console.log("listening on port " + port);
  return server;
}
"""
_REWRITE = (
    f"Rename the variable total to amount in this function and print the whole function.\n\n{_INVOICE}",
    f"Add type hints to this function and print the whole function.\n\n{_INVOICE}",
    f"Add a docstring to every method of this class and print the whole class.\n\n{_STACK}",
    f"Rename this class to Pile and its method size to count, and print the whole class.\n\n{_STACK}",
    f"Rewrite this function so that the file is opened in a with statement, and print it.\n\n{_READINGS}",
    f"Rename readings to samples in this function and print the whole function.\n\n{_READINGS}",
    f"Replace var by const and the inner function by an arrow function, and print all of it.\n\n{_SERVER}",
    f"Change the port's parameter name to portNumber everywhere and print all of it.\n\n{_SERVER}",
    f"Add a method peek that returns the last item without removing it, and print the whole class.\n\n{_STACK}",
)
_FERRY = """The ferry between Aldness and the Isle of Corra will run only on weekdays from October. The council says
that weekend crossings carried fewer than thirty passengers a day last winter, while fuel costs rose by a fifth.
Islanders have collected six hundred signatures against the change. The operator offers a Saturday crossing if the
school trips of the mainland are moved to that day. A decision is expected at the meeting on 14 September."""
_BEES = """Researchers fitted small tags to 1,200 honey bees from nine hives and followed them for two summers. Bees
that grew up in hives near flower strips began to forage four days later than others and lived about a week longer.
The team thinks that better nourished larvae turn into adults with larger reserves. Hives beside wheat fields showed
no such effect, whatever their size. The study says nothing about wild bees, which do not store honey."""
_LIBRARY = """Since the library of Venn Street opened its tool shelf, people have borrowed 3,400 drills, saws and
ladders. Most are returned on time; eleven items are missing. The shelf is run by retired craftsmen who repair what
breaks and teach a free course every Thursday. The city now plans the same for four more branches, paid for by the
money that was meant for a new reading room. Some regular readers are not pleased."""
_SHIP = """The freighter Mirela ran aground on Tuesday night on the Teln sandbank, two miles off the lighthouse.
Nobody was hurt. Two tugs tried to pull the ship free at high water on Wednesday but gave up when a cable broke. The
owner will now unload part of the 5,000 tons of gravel onto barges. Divers found no leak. The harbour master has
closed the eastern channel until Saturday."""
_SUMMARY = (
    f"Summarise this report in two sentences.\n\n{_FERRY}",
    f"Summarise this article in three bullet points.\n\n{_BEES}",
    f"Write a headline and one sentence for this news item.\n\n{_LIBRARY}",
    f"Summarise this message for a captain in a hurry.\n\n{_SHIP}",
    f"List the arguments of both sides in this report.\n\n{_FERRY}",
    f"What did the researchers find, and what did they not find? Answer from the text.\n\n{_BEES}",
    f"Summarise the text in one short paragraph, keeping all numbers.\n\n{_LIBRARY}",
    f"Tell what happened in the order in which it happened.\n\n{_SHIP}",
)
_EXTRACT = (
    "Extract the fields name, street, city, phone and order as a JSON object.\n\nBob Stone lives at 14 Mill Road in "
    "Leeds, phone 555 0142, and orders 12 garden chairs.",
    "Extract the fields number, customer, email, quantity, item, price and currency as a JSON object.\n\nOrder "
    "NW-20417-B, placed by Ada Lindqvist (ada.lindqvist@northwind.example): 24 thermocouple probes, type K, at 18.40 "
    "EUR each.",
    "Extract every person with role and task as a JSON list.\n\nPresent: Maria Keller (chair), Tom Okafor (treasurer), "
    "Ines Duarte (secretary). Tom Okafor sends the revised plan to the printer. Ines Duarte books the hall in Lyon.",
    "Return the ingredients as a JSON list of objects with name, amount and unit.\n\nFor the dough take 500 g of "
    "flour, 300 ml of water, 10 g of salt, 7 g of dry yeast and 2 spoons of olive oil.",
    "Return the flights as a JSON list with number, from, to, departure and gate.\n\nKL 1023 leaves Amsterdam for "
    "London at 14:05 from gate D47. BA 432 leaves Amsterdam for Leeds at 15:30 from gate C12. VY 8301 leaves Amsterdam "
    "for Bilbao at 17:10 from gate B6.",
    "Extract title, author, year, publisher and isbn as JSON.\n\nThe Salt Road, a novel by Ruth Amberly, appeared in "
    "2014 with Harrow and Pike, ISBN 978-0-00-812345-6.",
    "Convert this table to a JSON list.\n\nname,department,started,city\nPetra Voss,sales,2019-03-01,Bremen\nJon Hale,"
    "support,2021-11-15,Cork\nMei Tanaka,research,2016-07-01,Osaka\n",
    "Extract date, place, magnitude and depth of every earthquake as a JSON list.\n\nOn 3 May a quake of magnitude 5.1 "
    "shook Tarvo at a depth of 12 km. On 9 May one of magnitude 4.4 followed near Lissa, 8 km deep. The strongest, "
    "magnitude 6.0, struck Port Anders on 21 May, 33 km deep.",
    "Copy these settings into a JSON object.\n\nhost is db7.internal.example, port is 5432, user is reporter, database "
    "is sales_2024, timeout is 30 seconds, retries is 5, encryption is on.",
)
_TRANSLATE = (
    "Translate into French: The train to the coast leaves at nine, and we should buy the tickets today.",
    "Translate into German: My grandmother keeps her recipes in a blue tin box that nobody else may open.",
    "Translate into Spanish: Please close the window before you leave; it is going to rain this afternoon.",
    "Translate into Italian: The museum is closed on Mondays, but the garden behind it is always open.",
    "Translate into English: Le petit chat dort sur la chaise pendant que les enfants jouent dans le jardin.",
    "Translate into English: Morgen fahren wir mit dem Fahrrad an den See und kommen erst am Abend zurück.",
    "Translate into English: La tienda de la esquina vende pan fresco, queso y las mejores aceitunas del barrio.",
    "Translate each sentence into French.\n1. Where is the station?\n2. I would like a cup of tea.\n3. How much does "
    "this book cost?\n4. We arrived yesterday.",
)
_REASON = (
    "A shop sells pens at 3 for 2 euros. How much do 18 pens cost? Explain each step.",
    "Anna is twice as old as Ben. In six years their ages add up to 42. How old are they now? Think step by step.",
    "A train leaves at 14:40 and arrives at 17:15. It stops twice for ten minutes. How long does it move?",
    "There are three boxes: one holds apples, one oranges, one both. All labels are wrong. How can one fruit tell all?",
    "If all bloops are razzies and some razzies are lazzies, must some bloops be lazzies? Explain.",
    "A rectangle is 4 cm longer than wide and has an area of 96 square centimetres. Find its sides, step by step.",
    "Five friends shake hands once with each other. How many handshakes are there? Show how you count them.",
    "What is 17 times 23? Compute it in two different ways and compare the results.",
    "A tank fills in 6 hours and empties in 9 hours. Both valves are open. After how many hours is it full? Explain.",
)
_STORY = (
    "Write a short story about a fox who learns to read.",
    "Write the opening of a novel in which the last lighthouse keeper finds a letter addressed to himself.",
    "Tell a bedtime story about a cloud that is afraid of heights.",
    "Write a short ghost story that is set in a laundrette at night.",
    "Write a fairy tale about a clockmaker who sells time.",
    "Tell the story of two neighbours who quarrel about a pear tree for forty years.",
    "Write a scene in which a robot visits the beach for the first time.",
    "Write a short story that begins with the words: Nobody had opened the green door since the flood.",
)
WORKLOADS: dict[str, tuple[str, ...]] = {
    "chat": _CHAT,
    "code": _CODE,
    "rewrite": _REWRITE,
    "summary": _SUMMARY,
    "extract": _EXTRACT,
    "translate": _TRANSLATE,
    "reason": _REASON,
    "story": _STORY,
}
TITLES = {
    "chat": "chat",
    "code": "code writing",
    "rewrite": "code rewriting",
    "summary": "summarising",
    "extract": "extraction to JSON",
    "translate": "translation",
    "reason": "reasoning",
    "story": "free story",
}


def built_in(names: Sequence[str] = ()) -> list[Prompt]:
    """The prompts of the workloads ``names``, all of them when empty. Raises ``ConfigError`` for an unknown name."""
    for name in names:
        if name not in WORKLOADS:
            raise ConfigError(f"--workloads got {name!r}, expected some of {', '.join(WORKLOADS)}")
    chosen = dict.fromkeys(names or WORKLOADS)
    return [Prompt(name, f"{name} {i}", text) for name in chosen for i, text in enumerate(WORKLOADS[name], start=1)]


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file: JSON lines, or text with one prompt per line.

    A JSON line is a string, or an object with ``prompt`` and perhaps ``workload`` and ``system``; a file whose name
    ends in .jsonl or whose first line begins with a brace or a quote is read as that. Empty lines are passed over.
    Raises ``ConfigError`` that names the line.
    """
    lines = list(_lines(path))
    if not lines:
        raise ConfigError(f"--prompts {path} holds no prompt; expected JSON lines, or text with one prompt per line")
    is_json = path.suffix in (".jsonl", ".ndjson") or lines[0][1][0] in '{"'
    fields = [_parsed(text, f"--prompts {path}, line {number}") for number, text in lines] if is_json else []
    return list(_numbered(fields or [(OWN, text, None) for _, text in lines]))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and texts of the lines that are not empty."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error.strerror}") from error
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = raw.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"--prompts {path}, line {number} is not UTF-8: byte {raw[error.start]:#04x}; convert it first (iconv)"
            ) from error
        if text:
            yield number, text


def _parsed(line: str, where: str) -> tuple[str, str, str | None]:
    """Workload, prompt and system message of one JSON line."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    fields = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} holds a {type(value).__name__}, expected a text or an object with 'prompt'")
    prompt, workload, system = fields.get("prompt"), fields.get("workload", OWN), fields.get("system")
    if not isinstance(prompt, str) or not prompt.strip():
        found = "no 'prompt'" if prompt is None else f"the prompt {prompt!r}"
        raise ConfigError(f"{where} has {found}, expected a text that is not empty")
    if not isinstance(workload, str) or not workload or not isinstance(system, str | None):
        raise ConfigError(f"{where} has a 'workload' or 'system' that is not a text")
    return workload, prompt, system


def _numbered(fields: Iterable[tuple[str, str, str | None]]) -> Iterator[Prompt]:
    counts: dict[str, int] = {}
    for workload, text, system in fields:
        counts[workload] = counts.get(workload, 0) + 1
        yield Prompt(workload, f"{workload} {counts[workload]}", text, system)
