"""One engine of `stoop bench cpu`, in a process of its own: stoop, llama.cpp or transformers.

This is a separate program. For llama.cpp it may run in a Python that has no stoop, so nothing from
stoop is imported unless the engine is stoop. It reads requests as lines of JSON from standard
input, the first of which says what to load, and answers each with a line. Between requests it
waits in a read, so that it takes no time from the engine that is measured.
"""

import importlib
import json
import os
import resource
import sys
import time
from typing import Any, Protocol

Answer = dict[str, Any]


class Engine(Protocol):
    """What every engine does. Prompts and answers are token ids; decoding is greedy."""

    imported_at: float  # of the clock that all processes share
    version: str
    threads: int
    drafts: int

    def answer(self, prompt: list[int], num_tokens: int) -> Answer:
        """tokens; times: seconds from the request to each token; steps: that decoded, if known"""


class Stoop:
    def __init__(self, task: Answer) -> None:
        import torch

        from stoop.core.sampling_params import SamplingParams
        from stoop.llm import LLM
        from stoop.version import __version__

        self.imported_at = time.monotonic()
        self.params = SamplingParams
        self.llm = LLM(task["model"], **task["options"])
        self.version = f"stoop {__version__}"
        self.threads = torch.get_num_threads()
        self.drafts = self.llm.config.schedule.num_drafts

    def answer(self, prompt: list[int], num_tokens: int) -> Answer:
        found = self.together([prompt], num_tokens)
        return {key: found[key][0] for key in ("tokens", "times", "steps")}

    def together(self, prompts: list[list[int]], num_tokens: int) -> Answer:
        """All requests at once."""
        engine = self.llm.engine
        params = self.params(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        tokens: list[list[int]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        counts = [0] * len(prompts)
        started = time.perf_counter()
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, params)
        while engine.has_work:
            outputs = engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                number = int(output.request_id)
                every = output.outputs[0].token_ids
                new = len(every) - len(times[number])
                counts[number] += new > 0
                times[number] += [now] * new
                tokens[number] = list(every)
        # The first token comes with the prompt.
        return {"tokens": tokens, "times": times, "steps": [count - 1 for count in counts]}


class LlamaCpp:
    drafts = 0

    def __init__(self, task: Answer) -> None:
        library = importlib.import_module("llama_cpp")
        self.imported_at = time.monotonic()
        self.version = f"llama-cpp-python {library.__version__}"
        self.threads = task["threads"]
        self.llama: Any = library.Llama(
            model_path=task["model"],
            n_ctx=task["context"],
            n_threads=self.threads,
            n_threads_batch=self.threads,
            verbose=False,
        )

    def answer(self, prompt: list[int], num_tokens: int) -> Answer:
        self.llama.reset()  # or it would reuse what the last prompt has in common
        tokens: list[int] = []
        times: list[float] = []
        started = time.perf_counter()
        for token in self.llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
            times.append(time.perf_counter() - started)
            tokens.append(int(token))
            if len(tokens) == num_tokens:
                break
        return {"tokens": tokens, "times": times, "steps": None}


class Transformers:
    drafts = 0

    def __init__(self, task: Answer) -> None:
        import torch

        library = importlib.import_module("transformers")
        self.imported_at = time.monotonic()
        self.version = f"transformers {library.__version__}"
        self.threads = task["threads"]
        torch.set_num_threads(self.threads)
        self.torch: Any = torch
        library.logging.disable_progress_bar()
        library.logging.set_verbosity_error()
        self.model: Any = library.AutoModelForCausalLM.from_pretrained(
            task["model"], dtype=torch.float32
        )
        self.model.generation_config.eos_token_id = None  # it would end answers

    def answer(self, prompt: list[int], num_tokens: int) -> Answer:
        ids = self.torch.tensor([prompt])
        ticker = Ticker()
        with self.torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                streamer=ticker,
            )
        return {"tokens": out[0, len(prompt) :].tolist(), "times": ticker.times[1:], "steps": None}


class Ticker:
    """Notes when `generate` hands out the prompt and each token."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter() - self.started)

    def end(self) -> None:
        pass


ENGINES: dict[str, type[Stoop] | type[LlamaCpp] | type[Transformers]] = {
    "stoop": Stoop,
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
}


def cpu_seconds() -> float:
    """Of this process and of the children that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def resident_bytes() -> dict[str, int] | None:
    """rss: all resident memory, of which file: pages of files, and anon: the rest but for shmem."""
    names = {"VmRSS": "rss", "RssFile": "file", "RssAnon": "anon"}
    try:
        with open("/proc/self/status") as status:
            pairs = [line.split(":", 1) for line in status]
    except OSError:
        return None
    found = {names[key]: int(rest.split()[0]) * 1024 for key, rest in pairs if key in names}
    return found if len(found) == len(names) else None


def serve(requests: Any, reply: Any) -> None:
    engine: Any = None
    for line in requests:
        request = json.loads(line)
        try:
            if request["do"] == "load":
                engine = ENGINES[request["kind"]](request)
                found = {
                    "imported_at": engine.imported_at,
                    "ready_at": time.monotonic(),
                    "version": engine.version,
                    "threads": engine.threads,
                    "drafts": engine.drafts,
                }
            elif request["do"] == "together":
                found = engine.together(request["prompts"], request["num_tokens"])
            else:
                found = engine.answer(request["prompt"], request["num_tokens"])
                found["memory"] = resident_bytes()
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            found = {"error": f"{type(error).__name__}: {lines[0]}"}
        found["cpu_s"] = cpu_seconds()
        print(json.dumps(found), file=reply, flush=True)


def main() -> None:
    # What libraries print must not come between the replies.
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        serve(sys.stdin, reply)
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(1)  # the command is gone, or on its way


if __name__ == "__main__":
    main()
