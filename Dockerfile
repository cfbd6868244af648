# Megatron-core and this package on NVIDIA's PyTorch image, which brings torch, NCCL, Transformer Engine, apex and flash-attn.
#   docker build --build-arg BASE=<NVIDIA's registry>/nvidia/pytorch:25.04-py3 -t megatron-balance .
#   docker run --gpus all --ipc=host --rm megatron-balance doctor
# No default: which mirror of the image a cluster pulls from is the cluster's business. Written for tag 25.04-py3.
ARG BASE
FROM ${BASE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/megatron-balance

# The patches are reviewed against this version's source. --no-deps: the image's own torch stays.
ARG MEGATRON_CORE=0.19.2
RUN pip install --no-cache-dir --no-deps "megatron-core==${MEGATRON_CORE}" \
 && pip install --no-cache-dir "psutil>=5.9"

COPY setup.py pyproject.toml README.md ./
COPY megatron_balance megatron_balance
COPY patches patches
COPY configs configs
RUN pip install --no-cache-dir . && megatron-balance --help >/dev/null

RUN useradd --create-home balance
USER balance
WORKDIR /home/balance
ENTRYPOINT ["megatron-balance"]
CMD ["doctor"]
