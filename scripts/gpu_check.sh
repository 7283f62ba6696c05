#!/usr/bin/env bash
# On a machine with a GPU, from the root of the repository after `make setup` with a torch for CUDA
# (make setup TORCH="torch==2.13.0"): every test marked gpu, and the engine's micro-benchmark.
#
#   scripts/gpu_check.sh [model directory]     default: SmolLM2-135M, downloaded if it is not there
#   DTYPE=bfloat16                             of the benchmark; torch's kernel needs 16 bits
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
"$python" - <<'PY'
import importlib.metadata, sys, torch
print("python", sys.version.split()[0], "torch", torch.__version__, "cuda", torch.version.cuda)
for name in ("transformers", "flashinfer-python", "cupy-cuda12x"):
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(name, "is not installed")
if not torch.cuda.is_available():
    sys.exit("torch sees no GPU")
print("capability", torch.cuda.get_device_capability())
PY
[ $? -eq 0 ] || exit 1

status=0
"$python" -m pytest -m gpu -rs tests/engine tests/transport || status=$?
"$python" -m tandem_perf.micro engine --device cuda --dtype "${DTYPE:-bfloat16}" \
    ${1:+--model "$1"} || status=$?
exit "$status"
