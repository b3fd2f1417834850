"""The command line: python -m minidflash COMMAND.

An error that you can mend is one line on standard error and exit status 2.
"""

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

CUES = {"Question:": "Answer:", "Task:": "Python:", "Record:": "In words:"}


class Parser(argparse.ArgumentParser):
    """argparse, with one line for an error."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is; leave with status 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def with_cue(text: str) -> str:
    r"""A question of the little world gets the cue after which its answer starts.

    >>> with_cue("Question: 1 + 1?"), with_cue("def f(x):")
    ('Question: 1 + 1?\nAnswer:', 'def f(x):')
    """
    for start, cue in CUES.items():
        if text.startswith(start) and cue not in text:
            return f"{text.rstrip()}\n{cue}"
    return text


def seed(text: str) -> int:
    """A seed that torch takes."""
    if not 0 <= (number := int(text)) < 2**63:
        raise ValueError(text)
    return number


def generate(args: argparse.Namespace) -> int:
    """Continue a text; only the text goes to standard output."""
    import torch

    from minidflash.greedy import check_request
    from minidflash.kit import show
    from minidflash.kit.chat import other_habits, prompt_ids
    from minidflash.kit.models import find, load
    from minidflash.speculate import Drafter, NGramDrafter, NoDrafter, speculate
    from minidflash.verify import cut_tail, token_law

    by_name = args.draft in ("none", "n-gram")
    pair = load(args.model, None if by_name else args.draft, args.dtype, args.device)
    drafter: Drafter
    if args.draft == "none" or (args.draft is None and pair.model is None):
        drafter = NoDrafter()
    elif args.draft == "n-gram":
        drafter = NGramDrafter(args.block_size or 16)
    else:
        drafter = pair.drafter(args.block_size)
    if args.chat:
        talk = [{"role": "user", "content": args.text}]
        if args.system is not None:
            talk.insert(0, {"role": "system", "content": args.system})
        thinking = None if args.thinking is None else args.thinking == "on"
        prompt, text = prompt_ids(pair.tokenizer, talk, thinking), args.text + "\n\n"
        if args.draft and not by_name and (note := other_habits(find(args.draft), thinking)):
            print(f"minidflash: {note}", file=sys.stderr)
    else:
        if args.thinking is not None or args.system is not None:
            raise ValueError("--thinking and --system need --chat")
        prompt = pair.encode(text := with_cue(args.text))
    limit = pair.target.config.max_position_embeddings
    room = args.max_new_tokens
    if room is None:
        room = max(0, min(256, limit - len(prompt)))
    stream = show.Stream(pair.tokenizer)
    dice = torch.Generator().manual_seed(args.seed)
    # A mistake must come out before any text.
    check_request(pair.target, prompt, room, pair.stop_ids)
    law = token_law(torch.zeros(1, 1), args.temperature)
    cut_tail(law, args.temperature, args.top_k, args.top_p)
    if stream.colour:
        print(show.LEGEND, file=sys.stderr)
    stream.prompt(text)
    done = speculate(pair.target, stream.watch(drafter), prompt, room, pair.stop_ids,
                     args.temperature, dice, stream.round, args.top_k, args.top_p)
    stream.end(done)
    if args.stats:
        r = done.rounds
        ms = [1e3 * sum(x) / max(1, len(r)) for x in
              ([x.draft_seconds for x in r], [x.verify_seconds for x in r])]
        print(f"{len(done.tokens)} tokens ({done.stop}), {len(r)} rounds,"
              f" tau {done.acceptance_length:.2f}, {done.target_forwards} target passes,"
              f" {len(done.tokens) / max(1e-9, done.seconds):.0f} tokens/s\n"
              f"per round: draft {ms[0]:.1f} ms, verify {ms[1]:.1f} ms;"
              f" prefill {1e3 * done.prefill_seconds:.1f} ms", file=sys.stderr)
    return 0


def info(args: argparse.Namespace) -> int:
    """Versions, device, shipped models."""
    from importlib.metadata import version

    import torch

    from minidflash.kit import models

    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(f"{'torch':<13}{torch.__version__}")  # it also names the build, such as +cpu
    for name in ("transformers", "tokenizers", "safetensors", "numpy", "triton"):
        try:
            print(f"{name:<13}{version(name)}")
        except ImportError:
            print(f"{name:<13}not installed")
    print(f"{'CPU threads':<13}{torch.get_num_threads()}\n{'CUDA device':<13}{cuda}")
    for name in ("target", "dflash"):
        print()
        try:
            folder = models.shipped(name)
            describe(name, folder, models.recipe(name))
        except ValueError as error:
            print(error)
    return 0


def describe(name: str, folder: Any, recipe: dict[str, Any]) -> None:
    """Print what a shipped model is, how it was made and how good it is."""
    from minidflash.kit import checkpoint

    c = checkpoint.read_json(folder / checkpoint.CONFIG)
    size = sum(p.stat().st_size for p in folder.iterdir()) / 1e6
    print(f"{name:<13}{c['num_hidden_layers']} layers x {c['hidden_size']},"
          f" {c['num_attention_heads']}/{c['num_key_value_heads']} heads of {c['head_dim']},"
          f" vocabulary {c['vocab_size']}, {size:.1f} MB in {c.get('dtype')}")
    if "dflash_config" in c:
        print(f"{'':<13}block size {c['block_size']}, taps"
              f" {c['dflash_config']['target_layer_ids']} of {c['num_target_layers']} layers")
    if "command" in recipe.get("recipe", {}):
        print(f"{'':<13}made by: {recipe['recipe']['command']}")
    for key, value in recipe.get("scores", {}).items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        said = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in parts)
        print(f"{'':<13}{key}: {said.strip()}")


def parser() -> Parser:
    """Every command and option; train, start and grade have parsers of their own."""
    from minidflash.kit import ablations, bench, demo, duel, latency, speculators

    top = Parser(prog="python -m minidflash", description="DFlash, built up from what leads to it.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, help: str, run: Any) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=help)
        made.set_defaults(run=run)
        return made

    four = "Decode four unseen prompts, with and without DFlash."
    demo.arguments(command("demo", four, demo.main))
    one = command("generate", "Continue a text with the tiny pair, or with your own.", generate)
    one.add_argument("text", help='a text; "Question: ..." gets the cue "Answer:", "Task: ..." the'
                     ' cue "Python:", "Record: ..." the cue "In words:"')
    one.add_argument("--model", default="tiny", help="tiny, a folder or a hub id")
    one.add_argument("--draft", help="a folder or a hub id, or one of the words"
                     " none (plain decoding) and n-gram (lookup)")
    one.add_argument("--block-size", type=int, metavar="B", help="slots of a block (with anchor)")
    one.add_argument("--max-new-tokens", type=int, metavar="N", help="default 256, if they fit")
    one.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    one.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K likeliest")
    one.add_argument("--top-p", type=float, default=1.0, metavar="P", help="only the likeliest that"
                     " make up P together")
    one.add_argument("--seed", type=seed, default=0, help="of the chance at temperature > 0")
    one.add_argument("--chat", action="store_true", help="ask through the model's chat template")
    one.add_argument("--thinking", choices=("on", "off"), help="where the template can think")
    one.add_argument("--system", metavar="TEXT", help="a system message, with --chat")
    one.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    one.add_argument("--dtype", help="float32, bfloat16, float16; by device if not given")
    one.add_argument("--stats", action="store_true", help="figures, on standard error")
    command("info", "Versions, device, the shipped models and their scores.", info)
    bench.arguments(command("bench", "The same prompts through every decoder.", bench.main))
    duel.arguments(command("duel", "EAGLE's chains and trees against DFlash.", duel.main))
    one_thing = "Train drafters that differ in one thing, and decode with each."
    ablations.arguments(command("ablate", one_thing, ablations.main))
    latency.arguments(command("latency", "Time a pair's forwards by its shape.", latency.main))
    speculators.arguments(command("export", "A drafter's folder in another format, such as vLLM's.",
                                  speculators.export))
    for name, help in (("train", "Train a shipped model again, or a drafter on your own --data."),
                       ("start", "Write a room's exercises into work/."),
                       ("grade", "Mark the exercises in work/.")):
        commands.add_parser(name, help=help, add_help=False)
    return top


def dispatch(argv: list[str]) -> int:
    """Run one command; returns the exit status."""
    if argv[:1] == ["start"]:
        from minidflash.kit import start

        return start.main(argv[1:])
    if argv[:1] == ["grade"]:
        from minidflash.kit import grade

        return grade.main(argv[1:])
    if argv[:2] == ["train", "dflash"] and any(a.split("=")[0] == "--data" for a in argv):
        from minidflash.kit import conversations

        return conversations.main(argv[2:])
    if argv[:1] == ["train"]:
        from minidflash.kit import recipes

        return recipes.main(argv[1:])
    args = parser().parse_args(argv)
    import torch

    # Matrices this small are slower on many threads than on two.
    torch.set_num_threads(min(2, torch.get_num_threads()))
    return args.run(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a mistake in what was asked is one line on standard error and status 2."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        return dispatch(list(sys.argv[1:] if argv is None else argv)) or 0
    except BrokenPipeError:  # the reader of a pipe has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:  # a full disk is no fault of ours, nor of yours
        print(f"minidflash: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
