"""Compiles grammars for a model's vocabulary, in threads of their own, and keeps recent ones."""

import contextlib
import logging
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from stoop.config.errors import RequestError, StoopError
from stoop.core.structured import StructuredOutputs
from stoop.grammar.crew import Crew
from stoop.grammar.follower import Follower, make_free_text
from stoop.grammar.parsing import first_sentence, load_xgrammar, parse
from stoop.grammar.vocabulary import Vocabulary
from stoop.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_CACHE_BYTES = 256 << 20  # of compiled grammars that no request uses
OVERHEAD_BYTES = 8 << 10  # of any grammar, about
MAX_THREADS = 4  # of xgrammar, for one grammar
NUM_WORKERS = 2  # grammars at a time: one may take long, and others need not wait for it
MAX_SECONDS = 30.0  # for one grammar

NO_TOKENIZER = (
    "structured_outputs need the model's tokenizer, and the engine was made with "
    "skip_tokenizer_init=True: make it with a tokenizer"
)


@dataclass(frozen=True)
class Compiled:
    """A grammar for a vocabulary. It serves any number of requests."""

    grammar: Any  # xgrammar.CompiledGrammar
    vocabulary: Vocabulary
    num_bytes: int  # of the grammar; the library takes milliseconds to count those of a large one

    def follow(
        self, stop_ids: Iterable[int], after: str | None, output_ids: Iterable[int] = ()
    ) -> Follower:
        """Follow a request from the beginning of its answer, or from the tokens that it has."""
        stops = sorted(stop_ids)
        matcher = load_xgrammar().GrammarMatcher(self.grammar, override_stop_tokens=stops)
        free = make_free_text(after, self.vocabulary)
        follower = Follower(matcher, stops, free)
        output_ids = list(output_ids)
        taken = follower.advance(output_ids)
        assert taken == len(output_ids), (taken, len(output_ids))
        return follower


class PendingGrammar:
    """A grammar that is being compiled. Requests hold it as long as they need it."""

    def __init__(self, asked: StructuredOutputs, compiler: "_Compiler") -> None:
        self.asked = asked
        self.compiled: Compiled | None = None
        self.error: str | None = None  # why it cannot be compiled
        self.running = False  # also after it took too long, as long as a thread works on it
        self._compiler = compiler
        self._ready = threading.Event()
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        return self._ready.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Returns whether it is done."""
        return self._ready.wait(seconds)

    @property
    def num_bytes(self) -> int:
        """With the text of what was asked for, which a small grammar may have much of."""
        texts = (self.asked.choice or ()) if self.asked.kind == "choice" else (self._text,)
        size = sum(map(sys.getsizeof, texts))
        return OVERHEAD_BYTES + size + (self.compiled.num_bytes if self.compiled else 0)

    @property
    def _text(self) -> Any:
        return getattr(self.asked, self.asked.kind)

    def run(self) -> None:
        """Compile it, in a thread of a `Crew`."""
        started = time.perf_counter()
        self.running = True
        compiled, error = None, None
        try:
            compiled = self._compiler.compile(self.asked)
            log.info("compiled a grammar in %.2f s", time.perf_counter() - started)
        except StoopError as refusal:
            error = str(refusal)
        except Exception as failure:  # of the library, or of a tokenizer
            error = (
                f"structured_outputs.{self.asked.kind} cannot be compiled "
                f"({first_sentence(failure)}): simplify it"
            )
        finally:
            self.running = False
            self._settle(compiled, error)

    def fail(self, error: str) -> bool:
        return self._settle(None, error)

    def fail_late(self, seconds: float) -> bool:
        return self.fail(
            f"structured_outputs.{self.asked.kind} took longer than {seconds:g} s to compile: "
            "simplify it, with fewer parts or smaller counts and lengths"
        )

    def _settle(self, compiled: Compiled | None, error: str | None) -> bool:
        """The first one counts; returns whether this was it."""
        with self._lock:
            if self._ready.is_set():
                return False
            self.compiled, self.error = compiled, error
            self._ready.set()
            return True


class _Compiler:
    """Any thread may compile. The first one reads the vocabulary, which takes a while."""

    def __init__(self, folder: str | None, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._loaded: tuple[Vocabulary, Any] | None = None
        self._lock = threading.Lock()

    def compile(self, asked: StructuredOutputs) -> Compiled:
        grammar = parse(asked)  # first: it needs no vocabulary
        xgrammar = load_xgrammar()
        vocabulary, info = self.load()
        compiler = xgrammar.GrammarCompiler(info, max_threads=MAX_THREADS, cache_enabled=False)
        compiled = compiler.compile_grammar(grammar)
        return Compiled(compiled, vocabulary, int(compiled.memory_size_bytes))

    def load(self) -> tuple[Vocabulary, Any]:
        with self._lock:
            return self._load()

    def _load(self) -> tuple[Vocabulary, Any]:
        """The vocabulary, for us and for the library."""
        if self._loaded is None:
            if self._folder is None:
                raise RequestError(NO_TOKENIZER)
            vocabulary = Vocabulary.of(Tokenizer.from_folder(self._folder), self._vocab_size)
            xgrammar = load_xgrammar()
            info = xgrammar.TokenizerInfo(
                vocabulary.pieces,
                xgrammar.VocabType.RAW,
                vocab_size=self._vocab_size,
                stop_token_ids=[],  # a request has its own
            )
            self._loaded = vocabulary, info
        return self._loaded


class GrammarStore:
    """Compiled grammars by what was asked for; requests that ask for the same share one.

    A grammar stays as long as a request holds it; one that no request waits for any more is not
    compiled. Compiled ones stay while they fit into `max_bytes`, those used last.
    """

    def __init__(
        self, folder: str | None, vocab_size: int, max_bytes: int = MAX_CACHE_BYTES
    ) -> None:
        """folder: of the tokenizer; None if the engine has none"""
        self.max_bytes = max_bytes
        self._compiler = _Compiler(folder, vocab_size)
        self._known: weakref.WeakValueDictionary[StructuredOutputs, PendingGrammar]
        self._known = weakref.WeakValueDictionary()
        self._recent: OrderedDict[StructuredOutputs, PendingGrammar] = OrderedDict()
        self.num_bytes = 0  # of the recent grammars
        self._crew: Crew | None = None

    def warm_up(self) -> None:
        """Load the library and the vocabulary, so that the first grammar need not wait for them.

        An error comes again with a grammar.
        """
        with contextlib.suppress(Exception):
            self._compiler.load()

    def request(self, asked: StructuredOutputs) -> PendingGrammar:
        """Find a grammar or start to compile it. Does not wait."""
        key = replace(asked, after=None)  # where it begins is not part of a grammar
        found = self._known.get(key)
        if found is None or (found.error is not None and not found.running):
            found = self._known[key] = PendingGrammar(key, self._compiler)
            self._start(found)
        self._note_use(found)
        return found

    def get(self, asked: StructuredOutputs) -> Compiled:
        """Find a grammar that a request holds; compiled here and now if there is none."""
        pending = self.request(asked)
        pending.wait()
        self._note_use(pending)
        if pending.compiled is None:
            raise RequestError(pending.error or "the grammar could not be compiled")
        return pending.compiled

    def _note_use(self, used: PendingGrammar) -> None:
        """The newest stays in any case."""
        if used.compiled is None:
            return
        if used.asked not in self._recent:
            self._recent[used.asked] = used
            self.num_bytes += used.num_bytes
        self._recent.move_to_end(used.asked)
        while len(self._recent) > 1 and self.num_bytes > self.max_bytes:
            _, oldest = self._recent.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def _start(self, pending: PendingGrammar) -> None:
        if self._crew is None:
            self._crew = Crew(NUM_WORKERS, MAX_SECONDS)
            weakref.finalize(self, self._crew.close)
        self._crew.submit(pending)
