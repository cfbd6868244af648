"""Train TRL's SFTTrainer on chats of different lengths, balanced over all ranks by one line.

On CPU:

    torchrun --standalone --nproc-per-node 4 scripts/examples/trl_sft.py

A small model with random weights and a tokenizer of bytes; the chats are functions of the standard
library.
"""

from __future__ import annotations

import argparse
import inspect
import shutil
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportPrivateImportUsage]

from megatron_balance.torch.trainer import balance  # balance

SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and the words of a chat."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<|pad|>", eos_token="<|end|>", chat_template=TEMPLATE
    )


def chats() -> Dataset:
    """Questions for functions, and their sources."""
    functions = [each for module in (inspect, shutil) for _, each in inspect.getmembers(module, inspect.isfunction)]
    sources = [(each.__qualname__, inspect.getsource(each)[:2000]) for each in functions]
    return Dataset.from_list(
        [
            {"messages": [{"role": "user", "content": name}, {"role": "assistant", "content": source}]}
            for name, source in sources
        ]
    )


def main() -> None:
    """Train; the trainer prints what it logs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--planner", default="zeppelin", help="see docs/planners.md")
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    words = tokenizer()
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=0,
        eos_token_id=1,
    )
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            max_length=2048,
            assistant_only_loss=True,
            learning_rate=2e-3,
            logging_steps=1,
            use_cpu=not options.gpu,
            bf16=options.gpu,
            report_to=[],
            save_strategy="no",
        )
        model = AutoModelForCausalLM.from_config(config)
        trainer = SFTTrainer(model=model, args=args, processing_class=words, train_dataset=chats())
        trainer = balance(trainer, options.planner)  # balance
        trainer.train()


if __name__ == "__main__":
    main()
