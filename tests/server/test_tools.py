"""Reading tool calls and reasoning out of text, whole and in pieces."""

import json
import random

import pytest

from stoop.config.errors import RequestError
from stoop.core.structured import StructuredOutputs
from stoop.grammar.parsing import parse
from stoop.server.conversation import after_reasoning
from stoop.server.pieces import Content, Parts, PlainReader
from stoop.server.reasoning import ReasoningReader
from stoop.server.tools import FORMATS, choose_format
from stoop.server.tools.forced import JsonCalls, NamedCall

NAMES = ("get_weather", "now")
PARIS = '{"city": "Paris", "note": "a } \\" [ (", "deep": {"x": [1, {}]}}'
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
LLAMA = f'{{"name": "get_weather", "parameters": {PARIS}}}'

MAKERS = {
    "hermes": lambda: FORMATS["hermes"].reader(NAMES),
    "llama3_json": lambda: FORMATS["llama3_json"].reader(NAMES),
    "pythonic": lambda: FORMATS["pythonic"].reader(NAMES),
    "list": lambda: JsonCalls(NAMES),
    "named": lambda: NamedCall("now"),
    "think": lambda: ReasoningReader(PlainReader(), opened=False),
    "thinking": lambda: ReasoningReader(FORMATS["hermes"].reader(NAMES), opened=True),
}
CALL = [("get_weather", PARIS)]
NOW = ("now", "{}")
# Format, text, content, calls, and reasoning if there is some.
CASES = [
    ("hermes", HERMES, "", CALL),
    ("hermes", f"Let me see.\n{HERMES}\n{HERMES}\n", "Let me see.", CALL * 2),
    ("hermes", 'x <tool_call>{"arguments": {}, "name": "now"}</tool_call> y', "x y", [NOW]),
    ("hermes", "a < b and <tool> and <tool_ca", "a < b and <tool> and <tool_ca", []),
    ("hermes", "plain \n", "plain \n", []),
    ("hermes", "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
    ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', ..., []),
    ("hermes", '<tool_call>{"name": "now", "arguments": 3}</tool_call>', ..., []),
    ("hermes", '<tool_call>{"name": "now"', ..., []),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [1', "", [("now", '{"a": [1')]),
    ("llama3_json", LLAMA, "", CALL),
    ("llama3_json", f"<|python_tag|>{LLAMA}", "", CALL),
    ("llama3_json", f'{LLAMA}; {{"name": "now", "parameters": {{}}}}', "", [*CALL, NOW]),
    ("llama3_json", '{"answer": {"name": "now"}}', '{"answer": {"name": "now"}}', []),
    ("llama3_json", '{"name": "rm", "parameters": {}}', ..., []),
    ("llama3_json", '{"name": "Ann", "age": 3}', ..., []),
    ("llama3_json", "Hello {there}", "Hello {there}", []),
    ("llama3_json", "<|python", "<|python", []),
    ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', "", [NOW]),
    ("pythonic", '[get_weather(city="Pa]r)is", n=[1, 2]), now()]', "", [
        ("get_weather", '{"city": "Pa]r)is", "n": [1, 2]}'), NOW]),
    ("pythonic", "[now(a=true, b={'x': None})]", "", [("now", '{"a": true, "b": {"x": null}}')]),
    ("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
    ("pythonic", "[see (this)] text", "[see (this)] text", []),
    ("pythonic", "[rm(x=1)]", "[rm(x=1)]", []),
    ("pythonic", "[now(__import__('os'))]", "[now(__import__('os'))]", []),
    ("pythonic", "[now(", "[now(", []),
    ("pythonic", "no", "no", []),
    ("list", f'[{LLAMA}, {{"name": "now", "parameters": {{}}}}]', "", [*CALL, NOW]),
    ("named", '{"a": 1}', "", [("now", '{"a": 1}')]),
    ("think", "<think>hm < </think>\n\nYes", "Yes", [], "hm < "),
    ("think", "\n<think>hm</think>Yes", "Yes", [], "hm"),
    ("think", "<thin air", "<thin air", [], ""),
    ("think", "No <think>x</think>", "No <think>x</think>", [], ""),
    ("think", "<think>never ends </thi", "", [], "never ends </thi"),
    ("thinking", f"hm</think>{HERMES}", "", CALL, "hm"),
    ("thinking", f"{HERMES}</think>ok", "ok", [], HERMES),
]  # fmt: skip


def read(name, pieces):
    reader = MAKERS[name]()
    found = [piece for text in pieces for piece in reader.feed(text)]
    return found + reader.finish()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[1][:40]}")
def test_calls_are_read_however_the_text_is_cut(case):
    name, text, content, calls, *reasoning = case
    content = text if content is ... else content
    draw = random.Random(text)
    cuts = [[text], list(text)]
    for _ in range(20):
        places = sorted(draw.sample(range(len(text) + 1), min(4, len(text))))
        cuts.append([text[a:b] for a, b in zip([0, *places], [*places, None], strict=True)])
    for pieces in cuts:
        parts = Parts.of(read(name, pieces))
        found = [(call.name, call.arguments) for call in parts.calls]
        assert (parts.content, found) == (content, calls), pieces
        assert parts.reasoning == (reasoning[0] if reasoning else "")


def test_arguments_are_passed_on_as_they_come():
    reader = MAKERS["hermes"]()
    start = '<tool_call>{"name": "now", "arguments": {"a": "'
    assert len(reader.feed(start)) == 2  # the call and what there is of its arguments
    for letter in "hello":
        (piece,) = reader.feed(letter)
        assert piece.text == letter


def test_no_part_of_a_marker_is_shown():
    for name, text in (("hermes", HERMES), ("llama3_json", "<|python_tag|>" + LLAMA)):
        shown = [piece for piece in read(name, list(text)) if isinstance(piece, Content)]
        assert shown == [], name


def test_text_is_not_held_back_without_need():
    reader = MAKERS["hermes"]()
    assert reader.feed("Hello") == [Content("Hello")]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... <tool_call>\n{{ tool_call | tojson }}", "hermes"),
        ('{"name": function name, "parameters": dictionary of ...}', "llama3_json"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("plain", "hermes"),
    ],
)
def test_the_format_is_found_in_the_template(template, name):
    assert choose_format("auto", template).name == name
    assert choose_format("pythonic", template).name == "pythonic"


TOOLS = [
    {"type": "function", "function": {"name": "now"}},
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
]


@pytest.mark.parametrize("name", list(FORMATS))
def test_forced_calls_match_their_grammar(name):
    """What the grammar allows is read as calls, and nothing else is allowed."""
    grammar = Grammar(FORMATS[name].forced(TOOLS, parallel=True))
    one = '{"name": "get_weather", "%s": {"city": "Paris"}}'
    key = "arguments" if name == "hermes" else "parameters"
    both = [one % key, f'{{"name": "now", "{key}": {{}}}}']
    texts = {
        "hermes": "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in both),
        "llama3_json": "; ".join(both),
        "pythonic": f"[{', '.join(both)}]",
    }
    assert grammar.accepts(texts[name])
    reader = FORMATS[name].forced_reader(["now", "get_weather"])
    parts = Parts.of([*reader.feed(texts[name]), *reader.finish()])
    assert [call.name for call in parts.calls] == ["get_weather", "now"]
    assert json.loads(parts.calls[0].arguments) == {"city": "Paris"}
    assert not grammar.accepts(texts[name].replace("city", "town"))
    assert not grammar.accepts(texts[name].replace("now", "never"))
    assert not grammar.accepts("Hello")
    assert not grammar.accepts("")
    alone = Grammar(FORMATS[name].forced(TOOLS, parallel=False))
    assert not alone.accepts(texts[name])


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        ({"json_object": True}, '{"a": 1}', "[1]"),
        ({"json": '{"type": "integer"}'}, "12", '"x"'),
        ({"regex": "[ab]+"}, "ab", "c"),
        ({"choice": ["yes", "no"]}, "yes", "maybe"),
        ({"grammar": 'root ::= "x" | "y"'}, "y", "z"),
    ],
)
def test_reasoning_before_a_structured_answer(structure, good, bad):
    grammar = Grammar(after_reasoning(structure, opened=False))
    for thought in ("", "<think>hm < </think>", "<think>hm</think>\n\n"):
        assert grammar.accepts(thought + good)
        assert not grammar.accepts(thought + bad)
    assert not grammar.accepts("hm " + good)
    assert after_reasoning(structure, opened=True) == {**structure, "after": "</think>"}


@pytest.mark.parametrize("name", list(FORMATS))
def test_what_no_grammar_honours_is_refused_in_tools_too(name):
    """As in a schema on its own; xgrammar ignores it without an error."""
    pytest.importorskip("xgrammar")

    def structure(schema):
        function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
        return FORMATS[name].forced([{"type": "function", "function": function}], True)

    for schema in ({"not": {}}, {"type": "string", "pattern": "(?=x)"}):
        for forced in (structure(schema), after_reasoning({"json": schema}, opened=False)):
            with pytest.raises(RequestError, match="no grammar can honour"):
                parse(StructuredOutputs.of(forced))
    for forced in (structure({"type": "integer"}), after_reasoning({"regex": "a+"}, opened=False)):
        parse(StructuredOutputs.of(forced))


class Grammar:
    """xgrammar's opinion of whole texts."""

    def __init__(self, fields):
        xgrammar = pytest.importorskip("xgrammar")
        vocab = [chr(code) for code in range(128)]
        info = xgrammar.TokenizerInfo(vocab, stop_token_ids=[0])
        compiler = xgrammar.GrammarCompiler(info)
        self.matcher = xgrammar.GrammarMatcher
        if "json" in fields:
            self.compiled = compiler.compile_json_schema(json.dumps(fields["json"]))
        else:
            self.compiled = compiler.compile_structural_tag(fields["structural_tag"])

    def accepts(self, text):
        matcher = self.matcher(self.compiled)
        return matcher.accept_string(text) and matcher.accept_token(0)
