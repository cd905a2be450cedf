"""`stoop draft-vocab`: find the tokens that are worth drafting."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoop.cli.bench.common import check_file
from stoop.cli.options import Model
from stoop.cli.progress import StageProgress
from stoop.config.errors import ConfigError

if TYPE_CHECKING:
    from stoop.text.counting import TokenCounts

FLAG = "--from"
Size = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="number of tokens to list; default: a quarter of the vocabulary, at most 32,768",
    ),
]
SIZES = (4096, 8192, 16384, 32768, 65536)  # to print the coverage of


def draft_vocab(
    model: Model,
    source: Annotated[
        Path,
        typer.Option(
            FLAG,
            help="text to count: a text file, or a .jsonl file of texts or of records with a "
            "prompt, text, question, instruction, turns or messages field, with answers in answer, "
            "reference, response, completion, output or outputs, such as stoop generate --json "
            "prints",
        ),
    ],
    size: Size = None,
    out: Annotated[Path, typer.Option(help="file to write")] = Path("draft_vocab.json"),
) -> None:
    """List the most frequent tokens of a text, for drafts from a smaller vocabulary.

    A draft head that uses the target's LM head (MTP, EAGLE-1, some EAGLE-3 heads; not SmolLM2's)
    multiplies by all of it for each draft. With a list of frequent tokens it multiplies by their
    rows only, which is cheaper the larger the vocabulary is. Answers stay the same: a token that is
    not listed is never drafted, and the target decides.

    The best text is what the model itself answers to prompts like yours. The command prints what
    share of the text the most frequent tokens cover, and the same for a tenth of the texts that is
    held out, with tokens counted in the rest.

    Use the file with -sc '{"draft_vocab": FILE, ...}', or put it into the head's folder as
    draft_vocab.json, where engines find it.
    """
    check_file("--out", out)
    from stoop.checkpoint.fetch import resolve_model
    from stoop.config.schema import EngineOptions
    from stoop.engine.choose_weights import choose_packed
    from stoop.models.draft_vocab import TokenRanking, default_size, write_ranking
    from stoop.models.registry import read_model_spec
    from stoop.text.counting import count_tokens
    from stoop.text.tokenizer import Tokenizer
    from stoop.worker.device import find_device

    with StageProgress() as report:
        # As an engine would store it here, so that a GGUF file is converted once.
        packed = choose_packed(EngineOptions(model=model), find_device("auto"), report)
        folder = resolve_model(model, report=report, packed=packed)
        vocab_size = read_model_spec(folder).vocab_size
        size = default_size(vocab_size) if size is None else size
        if size >= vocab_size:
            raise ConfigError(
                f"--size {size}: the model has {vocab_size:,} tokens, choose fewer of them"
            )
        tokenizer = Tokenizer.from_folder(folder)
        counts = count_tokens(source, FLAG, tokenizer, vocab_size, report)
    _print_coverage(counts, size, source)
    token_ids = tuple(counts.ranking()[:size].tolist())
    notes = {
        "num_texts": counts.num_texts,
        "num_tokens": counts.num_tokens,
        "coverage": counts.coverage(size),
    }
    write_ranking(out, TokenRanking(vocab_size, token_ids, source.name), **notes)
    print(f"{out} lists {size:,} tokens")


def _print_coverage(counts: "TokenCounts", size: int, source: Path) -> None:
    vocab_size = len(counts.everywhere)
    total = f"{counts.num_tokens:,} tokens in {counts.num_texts:,} texts"
    print(f"{source}: {total}, {counts.num_kinds:,} different")
    for each in sorted({size, *(each for each in SIZES if each < vocab_size)}):
        text = f"{each:,} of {vocab_size:,} tokens cover {counts.coverage(each):.1%} of {source}"
        held_out = counts.held_out_coverage(each)
        print(text if held_out is None else f"{text}, {held_out:.1%} of texts held out")
    print(f"without a list, the {size:,} lowest ids cover {counts.lowest_coverage(size):.1%}")
    if counts.num_kinds < size:
        print(
            f"only {counts.num_kinds:,} different tokens occur, so the list ends with the lowest "
            "ids of the others: count more text, or lower --size"
        )
