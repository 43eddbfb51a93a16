#!/usr/bin/env bash
# A version of torch -> the package, built and tested whole with it in a copy of the tree and an environment of its own.
# From anywhere: `tests/packaging/other_torch.sh 2.11.0 [arguments of pytest]`; `PYTHON=python3.12` is another Python.
# PyPI's torch for Linux brings CUDA: 6 GB. They stay in build/ for the next call; `make clean` removes them.
set -euo pipefail
version=${1:?which version of torch?}
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
copy=build/torch-$version
mkdir -p "$copy"
find "$copy" -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} +
rm -f "$copy/.venv/.installed" "$copy/.venv/.torch"
git ls-files -z --cached --others --exclude-standard | tar --null -T - -cf - | tar -xf - -C "$copy"
make -C "$copy" test TORCH="torch==$version" ARGS="-m '' $*"
