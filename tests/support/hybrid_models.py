# type: ignore  # specs of Megatron's, built by keywords
"""Layer specs of hybrid models for `--spec`, of Megatron's own layers on CPUs, with long memory."""

import copy
import math

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

hybrid_block.TENorm = WrappedTorchNorm  # the stack closes with it, whatever the spec
LINEAR = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
# By default a state is forgotten in a few tokens, and a lost one changes no loss.
LASTS = {"A_init_range": (math.exp(-5), math.exp(-5))}
DELTA_NET = ModuleSpec(
    GatedDeltaNet, params=LASTS, submodules=GatedDeltaNetSubmodules(**LINEAR, out_norm=WrappedTorchNorm)
)


_LOCAL = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
_LATENT = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm").submodules
_ATTENTION = {"input_layernorm": WrappedTorchNorm, "self_attn_bda": get_bias_dropout_add}
_MLP = {"pre_mlp_layernorm": WrappedTorchNorm, "mlp_bda": get_bias_dropout_add}
_MAMBA = ModuleSpec(MambaMixer, params=LASTS, submodules=MambaMixerSubmodules(**LINEAR))
_AHEAD = MultiTokenPredictionLayerSubmodules(
    enorm=WrappedTorchNorm, hnorm=WrappedTorchNorm, eh_proj=ColumnParallelLinear, layer_norm=WrappedTorchNorm
)
stack = ModuleSpec(
    HybridStack,
    submodules=HybridStackSubmodules(
        mamba_layer=ModuleSpec(
            MambaLayer,
            submodules=MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=_MAMBA, mamba_bda=get_bias_dropout_add),
        ),
        gdn_layer=ModuleSpec(
            TransformerLayer, submodules=TransformerLayerSubmodules(self_attention=DELTA_NET, **_ATTENTION)
        ),
        attention_layer=ModuleSpec(
            TransformerLayer, submodules=TransformerLayerSubmodules(self_attention=_LOCAL.self_attention, **_ATTENTION)
        ),
        mla_layer=ModuleSpec(
            TransformerLayer, submodules=TransformerLayerSubmodules(self_attention=_LATENT.self_attention, **_ATTENTION)
        ),
        mlp_layer=ModuleSpec(MLPLayer, submodules=TransformerLayerSubmodules(mlp=_LOCAL.mlp, **_MLP)),
        moe_layer=ModuleSpec(
            MoETransformerLayer,
            submodules=TransformerLayerSubmodules(mlp=get_moe_module_spec(use_te=False, num_experts=8), **_MLP),
        ),
        mtp_block_spec=ModuleSpec(
            MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules(
                layer_specs=[ModuleSpec(MultiTokenPredictionLayer, submodules=_AHEAD)]
            ),
        ),
    ),
)


def gpt(config, vp_stage=None):
    # A GPT's layers, of which --linear-attention-freq says which have a gated delta net.
    plain = copy.copy(config.transformer)
    plain.experimental_attention_variant = None  # Megatron has that with Transformer Engine's layers alone
    block = get_gpt_decoder_block_spec(plain, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    block = copy.deepcopy(block)  # layers share specs
    first = get_transformer_layer_offset(config.transformer, vp_stage=vp_stage)
    pattern = get_linear_attention_pattern(config.transformer)[first:]
    for layer, linear in zip(block.layer_specs, pattern, strict=False):
        if linear:
            layer.submodules.self_attention = DELTA_NET
    return block
