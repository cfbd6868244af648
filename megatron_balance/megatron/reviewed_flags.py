"""Megatron's flags that were looked at: what becomes of each where plans run.

Of megatron-core 0.18.2 and 0.19.x, and of Megatron's branches main and dev of August 2026. A flag
that is in no list is named in the log of a run that gives it, and fails a test until it is in one.
"""

from __future__ import annotations

from collections.abc import Sequence

_HANDLED = """
account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split async-save attention-backend
attention-dropout attention-output-gate batch-invariant-mode bf16 calculate-per-token-loss check-for-large-grads
check-for-spiky-loss check-weight-hash-across-dp-replicas-interval chunked-optimizer-state-offload config-logger-dir
context-parallel-size cp-comm-type cp-partition-mode cpu-offloading-num-layers cuda-graph-impl data-args-path
data-cache-path data-path dataloader-inter-document-masking dataloader-type ddp-average-in-collective
decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers decoder-num-layers decoder-seq-length
defer-embedding-wgrad-compute delay-wgrad-compute distribute-saved-activations distributed-backend
distributed-timeout-minutes dynamic-context-parallel enable-cuda-graph enable-hyper-connections
enable-mhc-connections eval-iters eval-micro-batch-size experimental-attention-variant expert-model-parallel-size
expert-tensor-parallel-num-weight-shards expert-tensor-parallel-size external-cuda-graph fake-process-group
ffn-hidden-size fim-data fine-grained-activation-offloading finetune fp16 fp16-lm-cross-entropy
fp32-residual-connection fp4-format fp8-format fp8-recipe full-validation grad-reduce-in-bf16 group-query-attention
head-wise-attn-gate heterogeneous-layers-config-encoded-json heterogeneous-layers-config-path hidden-dropout
hidden-size hierarchical-context-parallel-sizes hybrid-context-parallel hybrid-layer-pattern hybrid-override-pattern
initial-loss-scale inprocess-restart iterations-to-skip kv-channels kv-lora-rank linear-attention-type load
log-max-attention-logit log-params-norm logits-load-dir logits-save-dir loss-scale make-vocab-size-divisible-by
max-position-embeddings micro-batch-size microbatch-group-size-per-virtual-pipeline-stage mlp-chunks-for-training
moe-enable-routing-replay moe-expert-capacity-factor moe-expert-rank-capacity-factor moe-ffn-hidden-size
moe-flex-dispatcher-backend moe-hybridep-pad-uneven-dispatch-inputs moe-hybridep-pad-variable-tokens
moe-input-jitter-eps moe-layer-freq moe-layer-recompute moe-n-hash-layers moe-paged-stash moe-router-force-biased
moe-router-force-load-balancing moe-router-load-balancing-type moe-router-topk moe-shared-expert-intermediate-size
moe-token-dispatcher-type moe-z-loss-coeff mtp-hsm mtp-num-layers multi-latent-attention multiple-validation-sets
no-bias-dropout-fusion no-check-for-nan-in-loss-and-grad no-gradient-accumulation-fusion no-initialization
no-masked-softmax-fusion no-mmap-bin-files no-overlap-p2p-communication no-persist-layer-norm no-rope-freq
no-rope-fusion normalization num-attention-heads num-distributed-optimizer-instances num-experts num-layers
num-query-groups offload-optimizer-states optimizer optimizer-cpu-offload optimizer-cuda-graph
overlap-dispatch-backward-with-experts-wgrad overlap-moe-expert-parallel-comm overlap-param-gather
override-ckpt-iteration padded-vocab-size per-split-data-args-path perform-rl-step phase-transition-iterations
pipeline-model-parallel-layout pipeline-model-parallel-size position-embedding-type q-lora-rank qk-clip qk-head-dim
qk-l2-norm qk-layernorm qk-pos-emb-head-dim recompute-granularity recompute-method recompute-modules
recompute-num-layers rerun-mode reset-attention-mask reset-position-ids result-rejected-tracker-filename rotary-base
rotary-base-per-layer rotary-percent save save-activations-interval save-dgrads-interval save-params-interval
save-wgrads-interval seed seq-length sequence-packing-scheduler sequence-parallel sft skip-train softmax-type spec
split swiglu tensor-model-parallel-size tensor-parallel-num-weight-shards tensorboard-log-interval test-data-path
tp-comm-overlap train-data-path train-iters transformer-impl untie-embeddings-and-output-weights
use-distributed-optimizer use-kitchen-attention use-megatron-fsdp use-nccl-ub use-precision-aware-optimizer
use-rope-scaling use-torch-fsdp2 use-tp-pp-dp-mapping use-varlen-dataset v-head-dim valid-data-path
varlen-sbhd-validation vocab-size window-attn-skip-freq window-size yaml-cfg
"""
HANDLED = frozenset(_HANDLED.split())
"""Refused, left out or set (`arguments`, `way_arguments`), or read by our code: plans go by them."""

_ELSEWHERE = """
activation-offload-fraction app-tag-run-name app-tag-run-version bert-embedder-type bert-load bert-no-binary-head
biencoder-projection-dim biencoder-shared-query-context-model block-data-path classes-fraction
cpu-offloading-retain-pinned-cpu-buffers csa-compress-ratios csa-compress-rotary-base csa-dense-mode csa-window-size
cuda-graph-modules cuda-graph-scope data-parallel-sharding-strategy data-per-class-fraction decode-only-cuda-graphs
delay-offload-until-cuda-graph delta-offload-bytes-across-pp-ranks dino-bottleneck-size dino-freeze-last-layer
dino-head-hidden-size dino-local-crops-number dino-local-img-size dino-norm-last-layer dino-teacher-temp
dino-warmup-teacher-temp dino-warmup-teacher-temp-epochs disable-dsa-indexer-rotate-activation
disable-dsa-indexer-scoring-relu dsa-indexer-head-dim dsa-indexer-k-norm-epsilon dsa-indexer-k-norm-fp32
dsa-indexer-loss-coeff dsa-indexer-n-heads dsa-indexer-rope-interleaved dsa-indexer-skip-topk-offset
dsa-indexer-topk dsa-indexer-topk-freq dsa-indexer-use-sparse-loss dsa-kernel-backend embedding-path
enable-chunked-prefill encoder-num-layers evidence-data-path fault-injector-delay-start-iteration
fault-injector-fault-delay fault-injector-fault-probabilities fault-injector-fault-types fault-injector-mtti-seconds
fault-injector-num-ranks fault-injector-offset-seconds fault-injector-ranks fault-injector-seed fim-eod-token
fim-fragment-rate fim-middle-token fim-no-prefix fim-pad-token fim-prefix-token fim-rate fim-split-sample
fim-spm-rate fim-suffix-token fine-grained-offloading-max-inflight-offloads flash-decode
fsdp-db-use-persist-buf-on-alloc-fail fsdp-double-buffer fsdp-manual-registration gdn-conv-pad-alignment
gdn-pre-gated-delta-rule-fusion gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute gdp-num-householder
grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-entropy-term-weight grpo-filter-groups-with-same-reward
grpo-group-size grpo-iterations grpo-kl-beta grpo-prompts-per-step gtp-expert-remat-nccl-ub gtp-remat-nccl-ub
gtp-remat-opt-in-modules gtp-remat-reduce-scatter-with-fp32-accumulation head-lr-mult ict-head-size ict-load img-h
img-w indexer-batch-size indexer-log-interval inference-batch-times-seqlen-threshold inference-coordinator-port
inference-cuda-graph-all-prefills inference-cuda-graph-max-tokens inference-cuda-graph-scope
inference-disable-ep-consensus inference-disable-triton-nvls-kernels inference-dynamic-batching
inference-dynamic-batching-async-sched-mode inference-dynamic-batching-block-size
inference-dynamic-batching-buffer-size-gb inference-dynamic-batching-cuda-graph-max-tokens
inference-dynamic-batching-cuda-graph-mixed-prefill-count inference-dynamic-batching-cuda-graph-sizing-distribution
inference-dynamic-batching-logprobs-mode inference-dynamic-batching-mamba-memory-ratio
inference-dynamic-batching-max-requests inference-dynamic-batching-max-tokens
inference-dynamic-batching-num-cuda-graphs inference-dynamic-batching-paused-buffer-size-gb
inference-dynamic-batching-prefix-caching inference-dynamic-batching-prefix-caching-coordinator-policy
inference-dynamic-batching-prefix-caching-eviction-policy inference-dynamic-batching-prefix-caching-mamba-gb
inference-dynamic-batching-prefix-caching-routing-alpha inference-dynamic-batching-sampling-backend
inference-dynamic-batching-track-generated-token-events inference-dynamic-batching-track-paused-request-events
inference-dynamic-batching-unified-memory-level inference-fuse-tp-communication inference-grouped-gemm-backend
inference-logging-step-interval inference-max-requests inference-max-seq-length
inference-moe-disable-fused-quant-kernels inference-moe-token-dispatcher-type inference-rng-tracker inference-shards
inference-text-gen-server-logging inference-use-synchronous-zmq-collectives inference-wandb-logging
inprocess-active-world-size inprocess-barrier-timeout inprocess-completion-timeout inprocess-empty-cuda-cache
inprocess-granularity inprocess-hard-timeout inprocess-heartbeat-interval inprocess-heartbeat-timeout
inprocess-last-call-wait inprocess-max-iterations inprocess-monitor-process-interval
inprocess-monitor-thread-interval inprocess-progress-watchdog-interval inprocess-soft-timeout
inprocess-termination-grace-time is-hybrid-model iter-per-epoch langrl-env-config linear-attention-freq
linear-conv-kernel-dim linear-cp-mode linear-key-head-dim linear-num-key-heads linear-num-value-heads
linear-value-head-dim logits-load-decode-threads logits-load-ignore-errors logits-load-kd-loss-alpha
logits-load-msc-prefetch-depth logits-load-prefetch-factor logits-save-dtype logits-save-top-k logits-save-top-p
logits-save-top-p-min-k mamba-head-dim mamba-inference-conv-states-dtype mamba-inference-ssm-states-dtype
mamba-num-groups mamba-num-heads mamba-state-dim mamba-training-ssm-states-dtype mask-factor mask-type
max-tokens-to-oom megatron-fsdp-cache-param-bucket-views megatron-fsdp-enable-fine-grained-param-gather
megatron-fsdp-grad-comm-dtype megatron-fsdp-main-grads-dtype megatron-fsdp-main-params-dtype
megatron-fsdp-max-pool-double-buffer megatron-fsdp-prefetch-recompute-forward-weights megatron-fsdp-version
mhc-init-gating-factor mhc-num-residual-streams mhc-recompute-layer-num mhc-sinkhorn-iterations
min-dynamic-context-parallel-size min-offloaded-tensor-size moe-ncclep-static-shape moe-ncclep-use-symm-mem
moe-ncclep-zero-copy mrope-interleaved mrope-section mtp-hybrid-override-pattern nccl-all-reduce-for-prefill
no-data-sharding no-dsa-indexer-rotate-activation no-dsa-indexer-scoring-relu no-inference-disable-ep-consensus
no-inference-dynamic-batching-prefix-caching no-inference-text-gen-server-logging
no-inference-use-synchronous-zmq-collectives no-inference-wandb-logging no-one-logger
no-rl-inference-logprobs-is-correction no-rl-offload-inference-model-weights-when-idle no-rl-partial-rollouts
no-rl-persist-cuda-graphs no-rl-skip-bos-token no-rl-training-cuda-graphs no-rl-use-sequence-packing
no-rl-verify-model-weights-swap num-channels num-classes num-residual-streams num-speculative-tokens o-groups
o-lora-rank offload-modules one-logger-async one-logger-project one-logger-run-name outer-dp-sharding-strategy
output-bert-embeddings patch-dim qk-clip-alpha qk-clip-threshold query-in-block-prob refit-method
relative-attention-max-distance relative-attention-num-buckets retriever-report-topk-accuracies
retriever-score-scaling rl-consumption-granularity rl-default-temperature rl-default-top-k rl-default-top-p
rl-durable-rollout-bank rl-generation-batch-size rl-generation-lag rl-importance-sampling-truncation-coef
rl-inference-expert-model-parallel-size rl-inference-expert-tensor-model-parallel-size
rl-inference-logprobs-is-correction rl-inference-model-unified-memory-level rl-inference-parsers
rl-inference-pipeline-model-parallel-size rl-inference-tensor-model-parallel-size rl-kv-cache-management-mode
rl-max-inflight-requests rl-num-parallel-generation-batches rl-num-parallel-generations
rl-offload-inference-model-weights-when-idle rl-offload-optimizer-during-inference rl-parallel-generation-tasks
rl-partial-rollouts rl-persist-cuda-graphs rl-profile rl-profile-dir rl-prompts-per-eval rl-rollout-bank-dir
rl-rollout-bank-max-bytes rl-sequence-packing-algo rl-sequence-packing-max-sequences-per-bin rl-skip-bos-token
rl-submission-granularity rl-training-cuda-graphs rl-use-sequence-packing rl-verify-model-weights-swap
swin-backbone-type titles-data-path torch-fsdp2-no-reshard-after-forward use-legacy-static-engine use-one-sent-docs
use-same-sampling-seed-across-dp-ranks vision-backbone-type vision-pretraining vision-pretraining-type
"""
ELSEWHERE = frozenset(_ELSEWHERE.split())
"""Without effect on a GPT that trains, or only beside a flag that is refused or left out: inference,
reinforcement learning, other models, layers with a state, FSDP, offloading, restarts in place."""

_HARMLESS = """
accumulate-allreduce-grads-in-fp32 activation-func-clamp-value adam-beta1 adam-beta2 adam-eps add-qkv-bias
adlr-autoresume adlr-autoresume-interval allow-ambiguous-pad-tokens apply-layernorm-1p apply-query-key-layer-scaling
apply-residual-connection-post-layernorm apply-wd-to-qk-layernorm async-ckpt-cpu-priority async-ckpt-io-priority
async-ckpt-use-cpu-shm async-strategy attention-softmax-in-fp32 auto-detect-ckpt-format batch-invariant-backend
batch-size cache-mla-latents calc-ft-timeouts chat-template checkpoint-activations ckpt-assume-constant-structure
ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format ckpt-drop-redundant-extra-state
ckpt-format ckpt-fully-parallel-load ckpt-fully-parallel-load-exchange-algo
ckpt-fully-parallel-load-per-rank-objects ckpt-fully-parallel-load-process-group ckpt-fully-parallel-save
ckpt-fully-parallel-save-process-group ckpt-pg-tensors-cache-create ckpt-pg-tensors-cache-path ckpt-step clip-grad
create-all-gather-group cross-entropy-fusion-impl cross-entropy-loss-fusion cuda-graph-dynamic-microbatches
cuda-graph-warmup-steps data-parallel-random-init dataloader-defer-npy-index-mmap dataloader-fast-cache-load
ddp-bucket-size ddp-num-buckets ddp-pad-buckets-for-high-nccl-busbw
ddp-param-name-patterns-for-fp32-local-accumulation ddp-reduce-scatter-with-fp32-accumulation decoupled-lr
decoupled-min-lr decrease-batch-size-if-needed dense-grouped-gemm deterministic-mode disable-align-grad-reduce
disable-bf16-reduced-precision-matmul disable-bias-linear disable-ckpt-load-validate-sharding-integrity
disable-clone-scatter-output-in-embedding disable-flight-recorder-dump-on-timeout
disable-flight-recorder-extra-dump-on-exec disable-flight-recorder-include-only-active disable-fp8-wgrad
disable-gloo-process-groups disable-grad-buffers-cpu-backup disable-jit-fuser disable-log-loss-scale-to-tensorboard
disable-mamba-mem-eff-path disable-manual-gc-eval disable-msc disable-pad-vocab-size
disable-param-buffers-cpu-backup disable-save-tokenizer-assets disable-straggler-on-startup
disable-stream-ckpt-dequant disable-strict-fsdp-dtensor-load disable-symmetric-registration
disable-tokenizer-sentencepiece-ignore-extra-whitespaces disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad
disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-split-ag disable-tp-comm-split-rs
disable-use-tokenizer-model-from-checkpoint-args dist-ckpt-format dist-ckpt-optim-fully-reshardable
dist-ckpt-save-pre-mcore-014 dist-ckpt-strictness dist-ckpt-workers distrib-optim-fully-reshardable-mem-efficient
distributed-timeout-seconds-after-init dump-param-to-param-group-map embedding-init-method-std
empty-unused-memory-level enable-experimental enable-ft-package enable-full-sharding-in-hsdp enable-msc
encoder-seq-length end-weight-decay eod-mask-loss ep-overlap-early-attn-memory-release error-injection-rate
error-injection-type eval-global-batch-size eval-interval exit-duration-in-mins exit-interval
exit-on-missing-checkpoint exit-signal exit-signal-handler exit-signal-handler-for-dataloader
exit-signal-handler-for-training exp-avg-dtype exp-avg-sq-dtype fallback-to-eager-attn first-last-layers-bf16
flash-attention-version flight-recorder-dump-path flight-recorder-include-stack-trace
flight-recorder-trace-buffer-size fp4-param-gather fp4-quantizer-factory fp4-recipe fp8-amax-compute-algo
fp8-amax-history-len fp8-interval fp8-margin fp8-output-proj fp8-param-gather fp8-quantizer-factory
freeze-all-layers ft-num-warmup-iters fused-residual-rmsnorm global-batch-size glu-linear-offset
gpu-sniff-test-interval high-priority-a2a-comm-stream high-priority-stream-groups hysteresis init-method-std
init-method-xavier-uniform init-model-with-meta-device keep-fp8-transpose-cache kitchen-attention-backend
lazy-mpu-init lion-beta1 lion-beta2 load-main-params-from-ckpt local-rank log-device-memory-used log-energy
log-interval log-memory-interval log-memory-to-tensorboard log-moe-overload-factor log-num-zeros-in-grad
log-progress log-straggler log-throughput log-timers-to-tensorboard log-validation-ppl-to-tensorboard
log-world-size-to-tensorboard logging-level loss-scale-window lr lr-decay-iters lr-decay-samples lr-decay-style
lr-warmup-fraction lr-warmup-init lr-warmup-iters lr-warmup-samples lr-wsd-decay-iters lr-wsd-decay-samples
lr-wsd-decay-style main-grads-dtype main-params-dtype manual-gc manual-gc-interval mask-prob
max-seqlen-per-dp-cp-rank memory-snapshot-path merge-file mid-level-dataset-surplus min-loss-scale min-lr
mla-down-proj-fusion mlp-chunks-for-prefill mock-data model-parallel-size moe-apply-probs-on-input
moe-aux-loss-coeff moe-combine-bwd-dtype moe-deepep-num-sms moe-dispatch-fwd-dtype moe-enable-deepep
moe-flex-dispatcher-num-sms moe-grouped-gemm moe-hybridep-num-blocks-permute moe-hybridep-num-blocks-unpermute
moe-hybridep-num-sms moe-hybridep-num-sms-preprocessing moe-latent-size moe-mlp-glu-interleave-size
moe-pad-expert-input-to-capacity moe-pad-experts-for-cuda-graph-inference moe-paged-stash-buffer-size-factor-cpu
moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-page-size moe-per-layer-logging moe-permute-fusion
moe-permute-fusion-into-hybridep moe-router-bias-update-rate moe-router-dtype moe-router-enable-expert-bias
moe-router-fusion moe-router-group-topk moe-router-num-groups moe-router-padding-for-fp8
moe-router-padding-for-quantization moe-router-pre-softmax moe-router-quantile-balancing-ema
moe-router-score-function moe-router-topk-scaling-factor moe-routing-trace-capture-hidden-states
moe-routing-trace-capture-logits moe-routing-trace-dump-weights moe-routing-trace-max-training-iters
moe-routing-trace-path moe-shared-expert-gate moe-shared-expert-glu-interleave-size moe-shared-expert-overlap
moe-single-grouped-bias moe-single-grouped-weight moe-token-drop-policy moe-upcycling-granularity
moe-use-grouped-tensor moe-use-upcycling mscale mscale-all-dim mtp-detach-heads mtp-loss-scaling-factor
mtp-standalone mtp-use-repeated-layer muon-coefficient-type muon-extra-scale-factor muon-fp32-matmul-prec
muon-momentum muon-nesterov muon-no-split-qkv muon-num-ns-steps muon-scalar-optimizer muon-scale-mode muon-tp-mode
muon-use-syrk mup-attn-scale-power mup-base-head-dim mup-base-hidden-size mup-embedding-mult mup-output-mult
mup-width-mult nccl-communicator-config-path no-align-grad-reduce no-align-param-gather
no-barrier-with-level-1-timing no-bias-gelu-fusion no-bias-swiglu-fusion no-ckpt-fully-parallel-save
no-ckpt-load-validate-sharding-integrity no-clone-scatter-output-in-embedding no-create-attention-mask-in-dataloader
no-dsa-kernel-fusion no-flight-recorder-dump-on-timeout no-flight-recorder-extra-dump-on-exec
no-flight-recorder-include-only-active no-fp8-wgrad no-gradient-reduce-div-fusion no-load-optim no-load-rng
no-log-loss-scale-to-tensorboard no-manual-gc-eval no-pad-vocab-size no-pin-cpu-grads no-pin-cpu-params
no-position-embedding no-save-optim no-save-rng no-save-tokenizer-assets no-stream-ckpt-dequant
no-strict-fsdp-dtensor-load no-tokenizer-sentencepiece-ignore-extra-whitespaces no-tp-comm-bulk-dgrad
no-tp-comm-bulk-wgrad no-tp-comm-overlap-ag no-tp-comm-overlap-rs no-tp-comm-split-ag no-tp-comm-split-rs
no-use-layer-wise-param-layout no-use-tokenizer-model-from-checkpoint-args no-weight-decay-cond-type
no-yarn-correction-range-round-to-int non-persistent-ckpt-type non-persistent-global-ckpt-dir
non-persistent-local-ckpt-algo non-persistent-local-ckpt-dir non-persistent-save-interval norm-epsilon
null-tokenizer-eod-id null-tokenizer-pad-id num-dataset-builder-threads num-layers-at-end-in-bf16
num-layers-at-start-in-bf16 num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank num-workers
nvtx-ranges object-storage-cache-path onnx-safe openai-gelu optimizer-offload-fraction
optimizer-state-offload-chunk-size-mb optimizer-state-offload-fraction original-max-position-embeddings otel-enabled
otel-service-name otel-span-groups output-logit-dtype overlap-cpu-optimizer-d2h-h2d overlap-grad-reduce
overlap-p2p-communication-warmup-flush overlap-param-gather-with-optimizer-step override-opt-param-scheduler
override-opt_param-scheduler pad-packed-seq-alignment per-dataset-sequences-path persistent-save-interval
pipeline-model-parallel-comm-backend pretrained-checkpoint profile profile-ranks profile-step-end profile-step-start
pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra pytorch-profiler-collect-shapes quick-geglu
rampup-batch-size recompute-activations record-memory-history record-shapes replication replication-factor
replication-jump reuse-grad-buf-for-mxfp8-param-ag rope-scaling-factor rope-type rotary-interleaved
rotary-scaling-factor rotary-seq-len-interpolation-factor run-workload-inspector-server sample-rate save-interval
save-retain-interval save-tokens-per-expert-interval sft-mock-dataset-config-json sft-tokenizer-prompt-format
sgd-momentum sharp-enabled-group short-seq-prob squared-relu start-eval-at-iter start-weight-decay
step-batch-size-schedule straggler-ctrlr-port straggler-minmax-count suggested-communication-unit-size
symmetric-ar-type te-precision-config-file te-rng-tracker tensorboard-dir tensorboard-queue-size test-mode
thd-max-packed-sequences thd-tail-padding-policy tiktoken-num-special-tokens tiktoken-pattern timing-log-level
timing-log-option tokenizer-hf-no-include-special-tokens tokenizer-hf-no-use-fast tokenizer-metadata tokenizer-model
tokenizer-sentencepiece-legacy tokenizer-special-tokens tokenizer-type tp-comm-bootstrap-backend tp-comm-overlap-cfg
tp-comm-overlap-rs-dgrad train-samples train-sync-interval trust-remote-code use-checkpoint-args
use-checkpoint-opt-param-scheduler use-checkpoint-opt_param-scheduler use-cpu-initialization use-dist-ckpt
use-flash-attn use-fused-mhc use-fused-weighted-squared-relu use-gigatoken use-grouped-gemm-for-dense-mlp
use-grouped-gemm-for-shared-expert use-layer-wise-param-layout use-mcore-models use-mp-args-from-checkpoint-args
use-mup use-persistent-ckpt-worker use-pytorch-profiler use-ring-exchange-p2p use-rotary-position-embeddings
use-sharp use-te-activation-func use-torch-optimizer-for-cpu-offload use-transformer-engine-op-fuser
validation-set-names varlen-mock-dataset-config-json verify-integrity vocab-extra-ids vocab-file wandb-entity
wandb-exp-name wandb-project wandb-save-dir warmup weight-decay weight-decay-incr-style wgrad-deferral-limit
yarn-beta-fast yarn-beta-slow yarn-correction-range-round-to-int yarn-original-max-position-embeddings
"""
HARMLESS = frozenset(_HARMLESS.split())
"""They change nothing that depends on which rank holds a token, or how many a rank holds."""

REVIEWED = HANDLED | ELSEWHERE | HARMLESS


def unreviewed(argv: Sequence[str]) -> list[str]:
    """The flags of a command line that are in no list and are not ours."""
    given = [word.partition("=")[0] for word in argv if word.startswith("--") and len(word) > 2]
    return [flag for flag in dict.fromkeys(given) if flag[2:] not in REVIEWED and not flag.startswith("--balance-")]
