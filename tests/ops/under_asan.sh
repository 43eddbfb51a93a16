#!/usr/bin/env bash
# csrc/ -> a library with AddressSanitizer -> the tests of the kernels, the fuzz run among them, under it.
# By hand, from anywhere: `tests/ops/under_asan.sh [python] [arguments of pytest]`;
# `-m ""` runs all rows. It builds in a folder of its own, in half a minute on two cores.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$(realpath -s "${1:-$root/.venv/bin/python}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$root"
# Without what tests that run meanwhile make and remove there.
find csrc torchopt_dist tests setup.py pyproject.toml README.md LICENSE conftest.py \
    -name __pycache__ -prune -o -type f ! -name "_C*.so" -exec cp --parents -t "$work" {} +
cd "$work"
# Addresses are checked at -O0, too, and -O1 takes the compiler longer than the tests then gain.
mkdir bin
printf '#!/usr/bin/env bash\nexec "%s" "${@/#-O3/-O0}"\n' "$(command -v "${CXX:-c++}")" >bin/c++
chmod +x bin/c++
CXX="$work/bin/c++" CFLAGS="-fsanitize=address -fno-omit-frame-pointer -g1" LDFLAGS="-fsanitize=address" REQUIRE_EXT=1 \
    "$python" setup.py -q build_ext --inplace
nm -D torchopt_dist/_C*.so | grep __asan_report > /dev/null || { echo "the library is not instrumented" >&2; exit 1; }
# Python and torch leak on purpose; what matters here is reading and writing out of bounds.
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" \
    ASAN_OPTIONS="detect_leaks=0:alloc_dealloc_mismatch=0" PYTHONPATH="$work" \
    "$python" -c 'import os, pytest, sys, torchopt_dist
assert torchopt_dist.__file__.startswith(os.getcwd()), torchopt_dist.__file__
sys.exit(pytest.main(sys.argv[1:]))' -q -p no:cacheprovider --timeout=600 \
    tests/ops/test_{kernels,bad_lists,backward,layouts,adam,adam_options,sgd_refused}.py "${@:2}"
