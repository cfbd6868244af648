#!/usr/bin/env bash
# What the sbatch scripts share: one torchrun a node, bare or in a container; made to be sourced.
#
#   launch [--dry-run] [flags of Megatron's ...]
#
# Variables, all optional but DATA:
#   EXPERIMENT      model and lengths: llama-3b, llama-7b, llama-13b, llama-30b, moe-8x550m (default llama-7b)
#   TECHNIQUE       any planner: zeppelin, te_ring, distca, ... (default: the experiment's, zeppelin)
#   CLUSTER         h100, h200, a800, ... or a YAML (default: what the machine says of itself)
#   DATA            prefix of the corpus, PREFIX.bin and PREFIX.idx ('megatron-balance corpus build' makes one)
#   TOKENS          tokens of all GPUs in a microbatch (default: 4096 for each GPU)
#   CONTEXT         context-parallel ranks of a replica (default: all GPUs; for hydraulis and megatron those of a node, or half
#                   of them on one node, or the largest number below that shares them equally, so that there are replicas);
#                   --seq-length is a replica's share of TOKENS
#   MICROBATCHES    of a replica and step (default: 1; for wlb_llm, hydraulis and megatron 4)
#   BALANCE_CONFIG  a YAML of your own in place of configs/experiment/$EXPERIMENT.yaml
#   SCRIPT          your own pretrain_gpt.py (default: megatron_balance.pretrain_gpt)
#   OUT             where logs and steps.jsonl go (default: out/slurm/<job>)
#   CHECKPOINTS     folder to save to and resume from (default: none are saved)
#   IMAGE           container image for enroot and pyxis; without it the job runs bare
#   MOUNTS          more of the container's mounts, as pyxis takes them: /a:/a,/b:/b
#   VENV            bare: the virtual environment to run in (default: what PATH has)
#   REPO            checkout of this repository (default: where sbatch was called)
# shellcheck disable=SC2034  # arrays are filled by name

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

# Flags of an .args file into the array named second: words, without comments.
read_flags() {
  local line
  local -n flags_of=$2
  while IFS= read -r line || [ -n "$line" ]; do
    line=${line%%#*}
    # shellcheck disable=SC2206  # a line is a flag and its values
    flags_of+=($line)
  done <"$1"
}

# The value after flag $1 among the words that follow; 1 if it is not there.
value_of() {
  local flag=$1 found=1
  shift
  while [ $# -gt 0 ]; do
    [ "$1" = "$flag" ] && found=$2
    shift
  done
  printf '%s' "$found"
}

# Names of the YAML files in folder $1.
names_in() {
  local file
  for file in "$1"/*.yaml; do
    file=${file##*/}
    printf '%s ' "${file%.yaml}"
  done
}

# The largest divisor of $1 that is at most $2.
divisor_of() {
  local divisor=$2
  while [ "$divisor" -gt 1 ] && [ $(($1 % divisor)) -ne 0 ]; do divisor=$((divisor - 1)); done
  printf '%s' "$((divisor > 1 ? divisor : 1))"
}

# The planner that the YAML $1 names: 'planner: NAME', '{name: NAME, ...}', or 'name: NAME' on a line below.
planner_of() {
  sed -nE '/^planner:/,/^[a-z]/{s/^(planner:| +)[ {]*(name: *)?([a-z_]+)[ ,}]*(,.*|#.*)?$/\3/p}' "$1" | sed -n 1p
}

first_host() {
  local hosts
  if [ -n "${SLURM_JOB_NODELIST:-}" ]; then
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")  # whole: a pipe that closes early would end the script
  else
    hosts=$(hostname)
  fi
  printf '%s' "${hosts%%$'\n'*}"
}

container_options() {
  local mounts=$1:$1,$2:$2,$3:$3
  [ -n "${CHECKPOINTS:-}" ] && mounts+=,$CHECKPOINTS:$CHECKPOINTS
  [ -n "${SCRIPT:-}" ] && mounts+=,$(dirname "$SCRIPT"):$(dirname "$SCRIPT")
  [ -f "${CLUSTER:-}" ] && mounts+=,$(dirname "$(realpath "$CLUSTER")"):$(dirname "$(realpath "$CLUSTER")")
  [ -n "${BALANCE_CONFIG:-}" ] && mounts+=,$(dirname "$(realpath "$BALANCE_CONFIG")"):$(dirname "$(realpath "$BALANCE_CONFIG")")
  [ -n "${MOUNTS:-}" ] && mounts+=,$MOUNTS
  printf '%s\n' "--container-image=$IMAGE" "--container-mounts=$mounts" "--container-workdir=$1" --no-container-mount-home
}

launch() {
  local dry_run=false
  if [ "${1:-}" = --dry-run ]; then
    dry_run=true
    shift
  fi
  local repo=${REPO:-${SLURM_SUBMIT_DIR:-$PWD}}
  local experiment=${EXPERIMENT:-llama-7b} technique=${TECHNIQUE:-} cluster=${CLUSTER:-}
  local config=${BALANCE_CONFIG:-$repo/configs/experiment/$experiment.yaml}
  local model=$repo/scripts/slurm/models/$experiment.args
  local nodes=${SLURM_JOB_NUM_NODES:-1} gpus=${SLURM_GPUS_ON_NODE:-8} job=${SLURM_JOB_ID:-0}
  [ -f "$repo/scripts/slurm/training.args" ] || fail "$repo is no checkout of megatron_balance; submit from there, or set REPO"
  [ -f "$model" ] || fail "EXPERIMENT=$experiment: no $model; there are: $(cd "$repo/scripts/slurm/models" && printf '%s ' *.args)"
  [ -f "$config" ] || fail "BALANCE_CONFIG=$config: no such file"
  config=$(realpath "$config")
  local planners=$repo/configs/planner
  [ -z "$technique" ] || [ -f "$planners/$technique.yaml" ] || fail "TECHNIQUE=$technique: no such planner; there are: $(names_in "$planners")"
  if [ -n "$cluster" ] && [ ! -f "$cluster" ]; then
    [ -f "$repo/configs/cluster/$cluster.yaml" ] || fail "CLUSTER=$cluster: no such file or name; there are: $(names_in "$repo/configs/cluster")"
  fi
  [ -n "${DATA:-}" ] || fail "DATA is not set: the prefix of PREFIX.bin and PREFIX.idx; 'megatron-balance corpus build PREFIX FILES...' makes them"
  [ -f "$DATA.idx" ] && [ -f "$DATA.bin" ] || fail "DATA=$DATA: no $DATA.bin or no $DATA.idx"
  [ -z "${SCRIPT:-}" ] || [ -f "$SCRIPT" ] || fail "SCRIPT=$SCRIPT: no such file"

  local flags=() common=()
  read_flags "$repo/scripts/slurm/training.args" common
  read_flags "$model" flags
  local tensor_parallel world=$((nodes * gpus)) context microbatches=1 replicas
  tensor_parallel=$(value_of --tensor-model-parallel-size "${flags[@]}" "$@")
  local stages; stages=$(value_of --pipeline-model-parallel-size "$@")
  [ $((world % (tensor_parallel * stages))) -eq 0 ] || fail "$nodes nodes of $gpus GPUs cannot hold tensor parallelism of $tensor_parallel and $stages stages; change the number of GPUs"
  context=$((world / (tensor_parallel * stages)))
  case ${technique:-$(planner_of "$config")} in
    wlb_llm) microbatches=4 ;;  # it moves documents between microbatches
    hydraulis | megatron)       # they deal documents to replicas
      microbatches=4
      if [ "$nodes" -gt "$stages" ]; then context=$(divisor_of "$context" $((context * stages / nodes))); else context=$(divisor_of "$context" $((context / 2))); fi
      ;;
  esac
  context=${CONTEXT:-$context} microbatches=${MICROBATCHES:-$microbatches}
  [ "$context" -gt 0 ] && [ $((world % (tensor_parallel * stages * context))) -eq 0 ] || fail "CONTEXT=$context: $world GPUs cannot hold so many times tensor parallelism of $tensor_parallel and $stages stages"
  replicas=$((world / (tensor_parallel * stages * context)))
  local tokens=${TOKENS:-$((4096 * world))} out=${OUT:-$repo/out/slurm/$job}
  [ $((tokens % replicas)) -eq 0 ] || fail "TOKENS=$tokens cannot be shared by $replicas replicas; set a multiple"
  tokens=$((tokens / replicas))
  # Strategies of hydraulis own their weights on the command line's layout alone.
  [ "${technique:-$(planner_of "$config")}" = hydraulis ] || common+=(--overlap-param-gather)

  local entry=(-m megatron_balance.pretrain_gpt)
  [ -z "${SCRIPT:-}" ] || entry=(-m megatron_balance.launch "$SCRIPT")
  local command=(srun "--nodes=$nodes" "--ntasks=$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1)
  if [ -n "${IMAGE:-}" ]; then
    mapfile -t -O "${#command[@]}" command < <(container_options "$repo" "$(dirname "$DATA")" "$out")
  else
    command+=("--chdir=$repo")
  fi
  # The node's number is known on the node only, hence bash; ranks are numbered node by node, in Slurm's order of the nodes.
  # shellcheck disable=SC2016  # expanded on the node
  command+=(bash -c 'exec torchrun --node-rank "$SLURM_NODEID" "$@"' torchrun)
  command+=("--nnodes=$nodes" "--nproc-per-node=$gpus" "--master-addr=$(first_host)" "--master-port=$((20000 + job % 20000))")
  command+=("${entry[@]}" --balance-config "$config" --balance-log "$out" --data-path "$DATA")
  command+=(--seq-length "$tokens" --max-position-embeddings "$tokens" --context-parallel-size "$context")
  command+=(--micro-batch-size 1 --global-batch-size "$((replicas * microbatches))")
  command+=("${common[@]}" "${flags[@]}")
  [ -z "$technique" ] || command+=(--balance-planner "$technique")
  [ ! -f "$cluster" ] || cluster=$(realpath "$cluster")
  [ -z "$cluster" ] || command+=(--balance-cluster "$cluster")
  [ -z "${CHECKPOINTS:-}" ] || command+=(--save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500)
  command+=("$@")

  # One thread a process, since nodes have more processes than memory channels. Megatron asks for one connection with tensor or
  # context parallelism alone; without, streams have queues of their own, and what hydraulis pulls hides behind computing.
  local environment=(OMP_NUM_THREADS=1)
  if [ "$(value_of --tensor-model-parallel-size "${command[@]}")" -gt 1 ] || [ "$(value_of --context-parallel-size "${command[@]}")" -gt 1 ]; then
    environment=(CUDA_DEVICE_MAX_CONNECTIONS=1 "${environment[@]}")
    [ "${technique:-$(planner_of "$config")}" != hydraulis ] || printf '%s\n' "note: Megatron asks for CUDA_DEVICE_MAX_CONNECTIONS=1 with tensor or context parallelism, so what strategies of hydraulis pull does not hide behind computing; CONTEXT=1 and tensor parallelism of 1 leave it out" >&2
  else
    unset CUDA_DEVICE_MAX_CONNECTIONS
  fi
  export "${environment[@]}"
  [ -z "${VENV:-}" ] || export PATH="$VENV/bin:$PATH"
  if $dry_run; then
    printf '%s' "${environment[*]}"
    printf ' %q' "${command[@]}"
    printf '\n'
    return
  fi
  mkdir -p "$out"
  exec "${command[@]}"
}

# Asks Slurm whether script $1 could be submitted; only where Slurm is, and outside a job.
test_submission() {
  if command -v sbatch >/dev/null && [ -z "${SLURM_JOB_ID:-}" ]; then
    sbatch --test-only "$1" || fail "sbatch --test-only $1: Slurm would refuse it; its reason is above"
  fi
}
