"""Programming prompts for training a draft head: Python functions to complete.

    python tools/code_prompts.py > code.jsonl

There are two sources: generated exercises with computed examples, and signatures and docstrings
from Python's standard library. So the output depends on the seed and on the Python version.
"""

import argparse
import ast
import json
import random
import signal
import string
import sysconfig
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

ASKED = (
    "Complete this Python function.",
    "Complete the following code:",
    "Complete the code.",
    "Finish this function:",
    "Finish the code below.",
    "Here is the beginning of a function. Write the rest.",
    "Please complete the function.",
    "Implement this function in Python:",
    "Write the body of this function:",
    "Fill in the missing code:",
)
PACKAGES_LEFT_OUT = ("test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo")


class Part(NamedTuple):
    name: str
    says: str
    does: Callable[[Any], Any]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % each for each in range(2, int(number**0.5) + 1))


def _digits(number: int) -> list[int]:
    return [int(digit) for digit in str(abs(number))]


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _next_prime(number: int) -> int:
    return next(each for each in range(number + 1, 2 * number + 2) if _is_prime(each))


def _vowels(text: str) -> int:
    return sum(letter in "aeiouAEIOU" for letter in text)


LETTERS = set(string.ascii_lowercase)
NUMBERS = (
    Part("even", "that are even", lambda n: n % 2 == 0),
    Part("odd", "that are odd", lambda n: n % 2 == 1),
    Part("positive", "that are greater than zero", lambda n: n > 0),
    Part("negative", "below zero", lambda n: n < 0),
    Part("large", "larger than ten", lambda n: n > 10),
    Part("small", "smaller than five", lambda n: n < 5),
    Part("prime", "that are prime numbers", _is_prime),
    Part("square", "that are perfect squares", lambda n: n >= 0 and int(n**0.5) ** 2 == n),
    Part("triple", "divisible by three", lambda n: n % 3 == 0),
    Part("fizz", "divisible by 3 or by 5", lambda n: n % 3 == 0 or n % 5 == 0),
    Part("single_digit", "that have only one digit", lambda n: len(_digits(n)) == 1),
    Part("two_digit", "with exactly two digits", lambda n: len(_digits(n)) == 2),
    Part("round", "ending in zero", lambda n: n % 10 == 0),
    Part("lucky", "that contain the digit 7", lambda n: 7 in _digits(n)),
    Part("odd_digit", "whose first digit is odd", lambda n: _digits(n)[0] % 2 == 1),
    Part("heavy", "whose digits add up to more than 9", lambda n: sum(_digits(n)) > 9),
)
NUMBER_TASKS = (
    Part("sum", "the sum of the numbers", sum),
    Part("count", "how many numbers there are", len),
    Part("list", "a list of the numbers", list),
    Part("squares", "a list of the squares of the numbers", lambda ns: [n * n for n in ns]),
    Part("doubled", "a list with twice each of the numbers", lambda ns: [2 * n for n in ns]),
    Part("largest", "the largest of the numbers", lambda ns: max(ns, default=None)),
    Part("smallest", "the smallest of the numbers", lambda ns: min(ns, default=None)),
    Part("sorted", "a sorted list of the numbers", sorted),
    Part("descending", "the numbers from high to low", lambda ns: sorted(ns, reverse=True)),
    Part("reversed", "the numbers in reverse order", lambda ns: ns[::-1]),
    Part("first", "the first of the numbers, or None", lambda ns: ns[0] if ns else None),
    Part("last", "the last of the numbers, or None", lambda ns: ns[-1] if ns else None),
    Part("unique", "the numbers without duplicates", lambda ns: list(dict.fromkeys(ns))),
    Part("average", "the mean of the numbers", lambda ns: sum(ns) / len(ns) if ns else 0.0),
    Part("text", "a string with the numbers", lambda ns: ", ".join(str(n) for n in ns)),
    Part("any", "True if there is any of the numbers", bool),
    Part("range", "the largest minus the smallest", lambda ns: max(ns) - min(ns) if ns else 0),
    Part("digit_sums", "the sum of the digits of each", lambda ns: [sum(_digits(n)) for n in ns]),
)
WORDS = (
    Part("short", "with at most four letters", lambda w: len(w) <= 4),
    Part("long", "longer than five letters", lambda w: len(w) > 5),
    Part("vowel", "that start with a vowel", lambda w: w[0].lower() in "aeiou"),
    Part("consonant", "that end with a consonant", lambda w: w[-1].lower() not in "aeiou"),
    Part("upper", "that begin with a capital letter", lambda w: w[0].isupper()),
    Part("lower", "written in lower case", str.islower),
    Part("palindrome", "that read the same backwards", lambda w: w.lower() == w.lower()[::-1]),
    Part("even_length", "that have an even number of letters", lambda w: len(w) % 2 == 0),
    Part("odd_length", "that have an odd number of letters", lambda w: len(w) % 2 == 1),
    Part("double", "with two equal letters in a row", lambda w: any(map(str.__eq__, w, w[1:]))),
    Part("a", "that contain the letter a", lambda w: "a" in w.lower()),
    Part("distinct", "whose letters are all different", lambda w: len(set(w)) == len(w)),
)
WORD_TASKS = (
    Part("list", "a list of the words", list),
    Part("count", "the number of words", len),
    Part("lengths", "the length of each of the words", lambda ws: [len(w) for w in ws]),
    Part("longest", "the longest of the words", lambda ws: max(ws, key=len, default="")),
    Part("joined", "the words joined by spaces", " ".join),
    Part("upper", "the words in upper case", lambda ws: [w.upper() for w in ws]),
    Part("backwards", "each of the words, reversed", lambda ws: [w[::-1] for w in ws]),
    Part("sorted", "the words in alphabetical order", sorted),
    Part("by_length", "the words sorted by their length", lambda ws: sorted(ws, key=len)),
    Part("initials", "the first letters of the words", lambda ws: "".join(w[0] for w in ws)),
    Part("letters", "how many letters the words have together", lambda ws: sum(map(len, ws))),
    Part("dict", "a dictionary from each word to its length", lambda ws: {w: len(w) for w in ws}),
    Part("vowels", "the vowels in the words", lambda ws: _vowels(str(ws))),
    Part("set", "how many different words there are", lambda ws: len(set(ws))),
)
TEXTS = (
    Part("count_vowels", "the number of vowels in the text", _vowels),
    Part("remove_spaces", "the text without its spaces", lambda s: s.replace(" ", "")),
    Part("swap_case", "the text with upper and lower case swapped", str.swapcase),
    Part("mirror", "the text followed by itself in reverse", lambda s: s + s[::-1]),
    Part("letter_counts", "how often each letter occurs", lambda s: {c: s.count(c) for c in s}),
    Part("word_count", "how many words the text has", lambda s: len(s.split())),
    Part("capitalize_words", "the text with each word capitalized", str.title),
    Part("is_pangram", "whether every letter is used", lambda s: set(s) >= LETTERS),
    Part("every_second", "every second character of the text", lambda s: s[::2]),
    Part("codes", "the character codes of the text", lambda s: [ord(c) for c in s]),
    Part("repeated", "the characters that occur again", lambda s: [c for c in s if s.count(c) > 1]),
    Part("compress", "each character once, in order", lambda s: "".join(dict.fromkeys(s))),
    Part("reverse_words", "the words in reverse order", lambda s: " ".join(s.split()[::-1])),
    Part("longest_word_length", "the longest length", lambda s: max(map(len, s.split()))),
    Part("dashes", "the words joined by dashes", lambda s: "-".join(s.split())),
)
SINGLES = (
    Part("digit_sum", "the sum of the digits of the number", lambda n: sum(_digits(n))),
    Part("factors", "all divisors of the number", _divisors),
    Part("next_prime", "the next larger prime number", _next_prime),
    Part("to_binary", "the binary digits of the number as a string", lambda n: bin(n)[2:]),
    Part("triangle", "the sum of all whole numbers up to n", lambda n: n * (n + 1) // 2),
    Part("countdown", "the numbers from n down to zero", lambda n: list(range(n, -1, -1))),
    Part("is_power_of_two", "True for a power of two", lambda n: n & (n - 1) == 0),
    Part("reverse_number", "the number with its digits reversed", lambda n: int(str(n)[::-1])),
    Part("table", "the first five multiples", lambda n: [n * i for i in range(1, 6)]),
    Part("grade", "'high' above 50, else 'low'", lambda n: "high" if n > 50 else "low"),
    Part("root", "the square root, rounded down", lambda n: int(n**0.5)),
    Part("hex_digits", "the number in base 16", lambda n: format(n, "x")),
)
VOCABULARY = [
    "apple",
    "banana",
    "Cherry",
    "level",
    "Otter",
    "moon",
    "window",
    "Anna",
    "radio",
    "bottle",
    "green",
    "Paris",
    "kayak",
    "summer",
    "tree",
    "letter",
    "Noon",
    "cat",
    "piano",
    "Garden",
    "river",
    "stone",
    "eye",
    "coffee",
    "Berlin",
    "yellow",
    "book",
    "noodle",
    "Iris",
    "winter",
]


def exercises(count: int, draw: random.Random) -> Iterator[str]:
    kinds = (
        lambda: _composed(draw, "numbers", "List[int]", NUMBERS, NUMBER_TASKS, _numbers),
        lambda: _composed(draw, "words", "List[str]", WORDS, WORD_TASKS, _words),
        lambda: _alone(draw, "text", "str", TEXTS, lambda d: " ".join(_words(d)) or "moon"),
        lambda: _alone(draw, "n", "int", SINGLES, lambda d: d.randint(1, 99)),
    )
    for _ in range(count):
        yield draw.choices(kinds, (10, 8, 2, 2))[0]()


def _numbers(draw: random.Random) -> list[int]:
    return [draw.randint(-20, 80) for _ in range(draw.randint(2, 7))]


def _words(draw: random.Random) -> list[str]:
    return draw.sample(VOCABULARY, draw.randint(2, 5))


def _composed(
    draw: random.Random,
    items: str,
    kind: str,
    choices: tuple[Part, ...],
    tasks: tuple[Part, ...],
    make: Callable[[random.Random], Any],
) -> str:
    which, task = draw.choice(choices), draw.choice(tasks)
    name = draw.choice((f"{task.name}_{which.name}", f"{which.name}_{items}_{task.name}"))
    says = draw.choice(
        (
            f"Return {task.says} {which.says}.",
            f"Given a list of {items}, return {task.says} {which.says}.",
            f"You get a list of {items} and have to find {task.says}\n    {which.says}.",
            f"Take only those {items} {which.says}, and return\n    {task.says}.",
        )
    )
    argument = draw.choice((items, items[0], "lst", "values", "items"))

    def does(given: list[Any]) -> Any:
        return task.does([each for each in given if which.does(each)])

    return _stub(draw, name, argument, kind, says, make, does)


def _alone(
    draw: random.Random,
    argument: str,
    kind: str,
    tasks: tuple[Part, ...],
    make: Callable[[random.Random], Any],
) -> str:
    task = draw.choice(tasks)
    says = draw.choice((f"Return {task.says}.", f"This function returns {task.says}."))
    return _stub(draw, task.name, argument, kind, says, make, task.does)


def _stub(
    draw: random.Random,
    name: str,
    argument: str,
    kind: str,
    says: str,
    make: Callable[[random.Random], Any],
    does: Callable[[Any], Any],
) -> str:
    examples = [(value, does(value)) for value in (make(draw) for _ in range(draw.randint(0, 3)))]
    style = draw.randrange(4)
    lines = [""] if examples else []
    if style == 1 and examples:
        lines.append(draw.choice(("Examples:", "For example:", "Example:")))
    for value, result in examples:
        call = f"{name}({value!r})"
        if style < 2:
            lines += [f">>> {call}", repr(result)]
        else:
            lines.append(f"{call} {'==' if style == 2 else '->'} {result!r}")
    quotes = draw.choice(('"""', '"""', "'''"))
    typed = draw.random() < 0.5
    head = f"def {name}({argument}: {kind}):" if typed else f"def {name}({argument}):"
    if typed and "List" in kind:
        head = "from typing import List\n\n\n" + head
    body = "".join(f"    {line}".rstrip() + "\n" for line in lines)
    return f"{head}\n    {quotes}{says}\n{body}    {quotes}\n"


def library(draw: random.Random) -> Iterator[str]:
    """Yield signatures and docstrings of standard library functions in random order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    stubs: dict[str, None] = {}
    for path in sorted(root.rglob("*.py")):
        if any(part in PACKAGES_LEFT_OUT for part in path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and 20 < len(ast.get_docstring(node) or "") < 700:
                node.body, node.decorator_list = node.body[:1], []
                stubs[ast.unparse(node) + "\n"] = None
    yield from draw.sample(list(stubs), len(stubs))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--exercises", type=int, default=6000, help="default: 6000")
    parser.add_argument(
        "--library", type=int, default=4000, help="at most this many; default: 4000"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when piped into head
    draw = random.Random(options.seed)
    found = dict.fromkeys(exercises(options.exercises, draw))
    found |= dict.fromkeys(islice(library(draw), options.library))
    for stub in found:
        print(json.dumps({"prompt": f"{draw.choice(ASKED)}\n\n{stub}"}))


if __name__ == "__main__":
    main()
