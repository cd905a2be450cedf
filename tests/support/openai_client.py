"""What tests with OpenAI's client share: the served model's template, requests, and readers."""

import time
from typing import Any

import httpx

from support.server import ServerProcess

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
TEMPLATE = (
    "{% if tools %}<s>tools: {{ tools | tojson }} in <tool_call></s>{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{% if not (continue_final_message and loop.last) %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
PROMPT = "abab abab"
CHAT: Any = [{"role": "user", "content": "abab abab"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "set_light",
        "description": "switches",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}, "room": {"enum": ["hall", "bath"]}},
            "required": ["on", "room"],
            "additionalProperties": False,
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "set_light"}}
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "size": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["ok", "size", "count"],
    "additionalProperties": False,
}


def stats(server: ServerProcess) -> dict[str, Any]:
    return dict(httpx.get(f"{server.url}/stats").json())


def chat_texts(stream: Any, num_choices: int = 1) -> tuple[list[str], list[Any]]:
    """The texts of a stream by choice, and its chunks."""
    texts, chunks = [""] * num_choices, []
    for chunk in stream:
        chunks.append(chunk)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    return texts, chunks


def until_idle(server: ServerProcess, headers: dict[str, str] | None = None) -> float:
    """Seconds until no request runs and no block is used."""
    started = time.monotonic()
    while time.monotonic() < started + 20:
        found = httpx.get(f"{server.url}/stats", headers=headers).json()
        if not found["num_requests_running"] and not found["kv_cache_usage"]:
            return time.monotonic() - started
        time.sleep(0.01)
    raise AssertionError(found)
