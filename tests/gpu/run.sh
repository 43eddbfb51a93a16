#!/usr/bin/env bash
# A machine with a GPU, CUDA and torch, and no network → the package built there, and proven part by part.
# `tests/gpu/run.sh [PART…]`, from anywhere; the parts are those of parts.py, all if none is named. `PYTHON` is the
# Python that has torch, `RESULTS` the folder for what is found (default: build/gpu). The exit code counts failures.
# `make gpu-pack` makes build/gpu-pack, which must be there. `BUILD=0` takes the kernels that are there, and does not
# build them. Without a GPU the parts run on the CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-python3}
export RESULTS=${RESULTS:-build/gpu} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
mkdir -p "$RESULTS"
site=$PWD/build/gpu-site
rm -rf "$site"
mkdir -p "$site"
"$PYTHON" tests/gpu/install.py build/gpu-pack "$site"
export PYTHONPATH=$PWD:$site PATH=$site/bin:$PATH
export PYTORCH_NVML_BASED_CUDA_CHECK=1 # a process that has asked whether there is a GPU can still be forked
if [ "${BUILD:-1}" = 0 ]; then
    echo "took the kernels that are there: $(echo torchopt_dist/_C*.so)"
elif command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    start=$SECONDS
    TORCH_CUDA_ARCH_LIST=$("$PYTHON" -c 'import torch; print("{}.{}".format(*torch.cuda.get_device_capability()))')
    export TORCH_CUDA_ARCH_LIST
    MAX_JOBS=$(nproc) REQUIRE_EXT=1 FORCE_CUDA=1 "$PYTHON" setup.py -q build_ext --inplace >"$RESULTS/build.txt" 2>&1 ||
        { tail -n 40 "$RESULTS/build.txt"; echo "the kernels were not built"; exit 1; }
    echo "built the kernels for $TORCH_CUDA_ARCH_LIST in $((SECONDS - start)) s"
elif ! compgen -G "torchopt_dist/_C*.so" >/dev/null; then
    REQUIRE_EXT=1 "$PYTHON" setup.py -q build_ext --inplace >"$RESULTS/build.txt" 2>&1 || { tail -n 40 "$RESULTS/build.txt"; exit 1; }
fi
exec "$PYTHON" -m tests.gpu "$@"
