"""`megatron-balance corpus`: documents to a Megatron `.bin/.idx` with their lengths kept, and what
such a corpus holds.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_balance.cli import inputs
from megatron_balance.errors import ConfigError
from megatron_balance.files import json_text

if TYPE_CHECKING:
    from megatron_balance.workloads.idx import CorpusIndex

# NumPy and the progress bar are imported where they are used, so that `megatron-balance --help`
# answers at once.

BAR_WIDTH = 40
HELP = "turn documents into a Megatron corpus (.bin/.idx), or describe one"


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="build|describe")
    build = actions.add_parser("build", help="one document per file, one token per byte, end-of-document token 256")
    add = build.add_argument
    add("prefix", metavar="PREFIX", help="the corpus is PREFIX.bin and PREFIX.idx")
    add("paths", metavar="FILE|FOLDER", nargs="*", type=Path, help="files, and folders to search for files")
    add("--stdlib", action="store_true", help="the Python standard library's .py sources, without installed packages")
    add("--suffix", default="", help="in folders, only files whose names end like this, for example .py")
    add("--max-bytes", type=int, metavar="N", help="skip and count files larger than N bytes")
    lines = "a tokenizer.json: FILEs are JSONL, a document a line, in its tokens"
    add("--tokenizer", metavar="FILE|FOLDER", type=Path, help=lines)
    add("--key", help="under which a line of JSONL has its text (default: text)")
    add("--force", action="store_true", help="replace another corpus of this name")
    add("--limit", type=int, metavar="N", help="at most N documents")
    describe = actions.add_parser("describe", help="check the two files against each other and print the lengths")
    describe.add_argument("prefix", metavar="PREFIX", help="the corpus is PREFIX.bin and PREFIX.idx")
    for action in (build, describe):
        action.allow_abbrev = False  # as for the verbs: an abbreviation is a typing mistake that happens to work
        inputs.add_json(action)


def run(args: argparse.Namespace) -> int:
    report = _build(args) if args.action == "build" else {}
    from megatron_balance.workloads.idx import read_index

    index = read_index(args.prefix)
    report |= _describe(index)
    if args.json:
        print(json_text(report, indent=1))
    else:
        _show(report)
    return 0


def _build(args: argparse.Namespace) -> dict[str, Any]:
    """Write the corpus; what was skipped."""
    from megatron_balance.workloads import idx

    inputs.check_positive(args, "max_bytes", "limit")
    inputs.check_beside(args, args.tokenizer is not None, "--tokenizer FILE", "key")
    if args.tokenizer is not None and (args.stdlib or args.max_bytes is not None):
        raise ConfigError("corpus build: --tokenizer reads JSONL; leave out --stdlib and --max-bytes")
    if not args.paths and not args.stdlib:
        raise ConfigError("corpus build: no documents; name files or folders after PREFIX, or give --stdlib")
    files = idx.find_files(args.paths, args.suffix)
    if args.stdlib:
        files += idx.find_files([idx.STANDARD_LIBRARY], ".py", leave_out=idx.INSTALLED)
    if not files:
        ending = f" ending in {args.suffix!r}" if args.suffix else ""
        raise ConfigError(f"corpus build: no files{ending} in {', '.join(map(str, args.paths))}")
    if args.tokenizer is not None:
        tokenizer = idx.TextTokenizer(args.tokenizer)
        built = idx.build_jsonl(args.prefix, files, args.key or "text", tokenizer, args.limit, replace=args.force)
        return {"end_of_document": tokenizer.end, "skipped": {"empty": built.empty, "beyond_limit": built.beyond_limit}}
    from tqdm import tqdm

    shown = tqdm(files, desc="corpus", unit=" files", file=sys.stderr)
    built = idx.build(args.prefix, shown, args.max_bytes, args.limit, replace=args.force)
    skipped = {"empty": built.empty, "too_large": built.too_large, "beyond_limit": built.beyond_limit}
    return {"end_of_document": idx.END_OF_DOCUMENT, "skipped": skipped}


def _describe(index: "CorpusIndex") -> dict[str, Any]:
    from megatron_balance.workloads.lengths import histogram, quantiles

    lengths = index.document_lengths
    return {
        "prefix": index.prefix,
        "token_type": str(index.dtype),
        "num_documents": index.num_documents,
        "num_tokens": index.num_tokens,
        "empty_documents": int((lengths == 0).sum()),
        "largest_token": index.largest_token(),
        "lengths": quantiles(lengths[lengths > 0]),
        "histogram": histogram(lengths),
    }


def _show(report: dict[str, Any]) -> None:
    size = f"{report['num_documents']:,} documents, {report['num_tokens']:,} tokens of {report['token_type']}"
    print(f"{report['prefix']}.bin/.idx: {size} (largest id {report['largest_token']})")
    if "skipped" in report:
        skipped = report["skipped"]
        large = f"files, {skipped['too_large']} too large" if "too_large" in skipped else "texts"
        print(f"skipped: {skipped['empty']} empty {large}, {skipped['beyond_limit']} beyond --limit")
    if report["empty_documents"]:
        print(f"{report['empty_documents']} documents have no tokens and are passed over in training")
    print("tokens per document: " + "  ".join(f"{name} {value:,}" for name, value in report["lengths"].items()))
    # A line for each range of lengths: its documents, their share of all tokens, and a bar.
    bars = {f"{bar['low']:,}-{bar['high']:,}": bar for bar in report["histogram"]}
    most, tokens = max(bar["documents"] for bar in bars.values()), sum(bar["tokens"] for bar in bars.values())
    width = max(map(len, bars))
    print(f"{'tokens':>{width}}  documents  of all tokens")
    for name, bar in bars.items():
        blocks = "#" * -(-BAR_WIDTH * bar["documents"] // most)
        print(f"{name:>{width}}  {bar['documents']:>9,}  {bar['tokens'] / tokens:>12.1%}  {blocks}".rstrip())
