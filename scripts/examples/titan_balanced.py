"""torchtitan's Llama 3 debug model, balanced, by torchtitan's own command (docs/titan.md).

PYTHONPATH=scripts/examples torchrun --nproc-per-node 4 -m torchtitan.train \
    --module titan_balanced --config llama3_debugmodel_balanced
"""

from torchtitan.models.llama3.config_registry import llama3_debugmodel

from megatron_balance.torch.titan import TitanTrainer, balanced


def llama3_debugmodel_balanced() -> TitanTrainer.Config:
    """The debug model's run; a model of yours likewise, with options of the planner."""
    return balanced(llama3_debugmodel(), planner="zeppelin")
