"""Pretrain a GPT with planned attention, inside Megatron's own loop.

`torchrun ... -m megatron_balance.pretrain_gpt --balance-config FILE <Megatron's own flags>`

Takes all of Megatron's own flags. The wheel of megatron-core ships its training loop without the
script that starts it; this is ours, on documents from `--data-path`. For a script of your own see
`megatron_balance.launch`.
"""

import sys
from typing import Any

from megatron_balance.megatron import entry


def main() -> None:
    """Parse Megatron's arguments, build the model and train."""
    import torch
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.arguments import parse_and_validate_args

    from megatron_balance.megatron import gpt
    from megatron_balance.megatron.data import document_datasets_provider
    from megatron_balance.megatron.flags import add_balance_arguments
    from megatron_balance.megatron.forward_step import forward_step

    args = parse_and_validate_args(extra_args_provider=add_balance_arguments)
    train: Any = pretrain  # of some versions, it takes a provider of the model
    config, provider = gpt.start(train, args)
    with entry.training(config, has_script=False):
        train(config, document_datasets_provider, *provider, ModelType.encoder_or_decoder, forward_step)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(entry.run(main))
