"""Run an unmodified Megatron training script with planned attention.

`torchrun ... -m megatron_balance.launch SCRIPT --balance-config FILE <the script's own flags>`

The script's data set provider and forward step are replaced where planning needs it; the log says
so.
"""

import argparse
import runpy
import sys
from pathlib import Path

from megatron_balance.errors import ConfigError
from megatron_balance.megatron import entry


def main() -> None:
    """Run the script named first as if it had been started itself, with our patches applied."""
    if sys.argv[1:2] in (["-h"], ["--help"]):
        from megatron_balance.megatron.flags import add_balance_arguments

        parser = argparse.ArgumentParser(
            prog="python -m megatron_balance.launch",
            usage="%(prog)s SCRIPT --balance-config FILE [the script's own flags, --help among them]",
            description=__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_balance_arguments(parser).print_help()
        return
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise ConfigError(
            "name the training script first: python -m megatron_balance.launch path/to/pretrain_gpt.py "
            "--balance-config FILE ..."
        )
    script = Path(sys.argv[1])
    if not script.is_file():
        raise ConfigError(f"{script}: no such training script")
    from megatron_balance.patches import applied
    from megatron_balance.patches.training_loop import ENTRY

    with applied(ENTRY):
        sys.argv = sys.argv[1:]
        sys.path.insert(0, str(script.resolve().parent))  # as python itself does; scripts import their neighbours
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    sys.exit(entry.run(main))
