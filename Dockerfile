# Megatron-core, Transformer Engine and this package on NVIDIA's PyTorch image, which brings torch
# and NCCL, and may bring apex.
#   docker build --build-arg BASE=<NVIDIA's registry>/nvidia/pytorch:26.06-py3 -t megatron-balance .
#   docker run --gpus all --ipc=host --rm megatron-balance megatron-balance doctor
# For Slurm with enroot and pyxis, then IMAGE=.../megatron-balance.sqsh:
#   enroot import -o megatron-balance.sqsh dockerd://megatron-balance:latest
# No default for the base: which mirror of the image a cluster pulls from is the cluster's business.
# 26.06-py3 is the image on which Megatron's own tests ran while its sources were at 0.19
# (docker/.ngc_version.dev there).
ARG BASE
FROM ${BASE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/megatron-balance

# All that is installed here stands in locks, with hashes, but a Transformer Engine that the base lacks.
# megatron-core: the patches are reviewed against exactly that source. --no-deps: the base's own torch
# and NumPy stay, and so do its constraints, which are set aside for this step alone.
COPY scripts/locks scripts/locks
RUN PIP_CONSTRAINT='' pip install --no-cache-dir --no-deps --require-hashes -r scripts/locks/image.txt

# The image's own pydantic serves from 2.7 up to 2.13: Megatron 0.19 keeps it below 2.14 for what
# Transformer Engine imports. Only another one, or none, is replaced; the bill of materials then has it.
RUN found="$(pip list --format=freeze | sed -nE 's/^pydantic==([0-9]+\.[0-9]+).*/\1/p')" \
 && if [ "$(printf '%s\n' 2.7 "${found:-0}" 2.13 | sort -V | sed -n 2p)" != "${found:-0}" ]; then \
      PIP_CONSTRAINT='' pip install --no-cache-dir --no-deps --require-hashes -r scripts/locks/pydantic.txt \
      && cat scripts/locks/pydantic.txt >>scripts/locks/image.txt; \
    fi

# The image's own Transformer Engine serves from this version up: what Megatron's lock file held
# after 0.19. Only an older one, or none, is replaced: its extension is then compiled against the
# image's torch, which takes a while, for the CUDA of that torch. The image's own constraints on
# versions are set aside for this one step.
ARG TRANSFORMER_ENGINE=2.17.1
RUN found="$(pip list --format=freeze | sed -nE 's/^transformer[-_]engine==([0-9]+(\.[0-9]+)*).*/\1/p')" \
 && least="$(printf '%s\n' "${TRANSFORMER_ENGINE}" "${found:-0}" | sort -V | head -n 1)" \
 && if [ "${least}" != "${TRANSFORMER_ENGINE}" ]; then \
      cuda="$(python -c 'import torch; print(torch.version.cuda.partition(".")[0])')" \
      && PIP_CONSTRAINT='' NVTE_FRAMEWORK=pytorch pip install --no-cache-dir --no-build-isolation --no-deps \
        "transformer-engine==${TRANSFORMER_ENGINE}" "transformer-engine-cu${cuda}==${TRANSFORMER_ENGINE}" \
        "transformer-engine-torch==${TRANSFORMER_ENGINE}"; \
    fi

# Gurobi, proprietary, is one of the solvers of the remap: only with --build-arg GUROBI=1. Its licence is
# the user's: mount it and set GRB_LICENSE_FILE.
ARG GUROBI=
RUN if [ -n "${GUROBI}" ]; then pip install --no-cache-dir --no-deps --require-hashes -r scripts/locks/gurobi.txt; fi

COPY setup.py pyproject.toml README.md LICENSE ./
COPY megatron_balance megatron_balance
COPY patches patches
COPY configs configs
COPY scripts/sbom.py scripts/sbom.py
# setuptools builds the package from a folder of its own, and leaves with it.
RUN PIP_CONSTRAINT='' pip install --no-cache-dir --no-deps --require-hashes --target /tmp/build -r scripts/locks/build.txt \
 && PYTHONPATH=/tmp/build pip install --no-cache-dir --no-deps --no-build-isolation . \
 && rm -r /tmp/build \
 && megatron-balance --help >/dev/null
# What the image adds to its base, as CycloneDX. What Gurobi adds has a bill of its own.
RUN mkdir -p /usr/share/sbom \
 && python scripts/sbom.py scripts/locks/image.txt >/usr/share/sbom/megatron-balance.cdx.json \
 && if [ -n "${GUROBI}" ]; then python scripts/sbom.py scripts/locks/gurobi.txt >/usr/share/sbom/gurobi.cdx.json; fi

# Which NCCL wins: the image's, in the system's library path. Its torch is linked against that one,
# and the network plugins of the image (HPC-X, RDMA and SHARP) were built for it. A wheel of NCCL
# beside it would serve whatever imports it first, so the build ends if one has come in. Whether the
# image has apex is the image's business: Megatron runs without it.
RUN if pip list --format=freeze | grep -E '^nvidia-nccl-cu[0-9]+=='; then echo "error: a wheel of NCCL beside the image's own" >&2; exit 1; fi \
 && ldconfig -p | grep -q 'libnccl\.so\.2' \
 && python -c "import importlib.util as u; assert u.find_spec('transformer_engine'), 'transformer_engine is missing'"

# A number, since some schedulers check that it is not 0 before they know the image's names.
RUN useradd --uid 10001 --create-home balance
USER 10001
WORKDIR /home/balance
# NVIDIA's entrypoint stays: it sets up the driver's compatibility libraries, and runs what it is
# given.
CMD ["megatron-balance", "doctor"]
