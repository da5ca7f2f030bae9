#!/bin/bash
# Checks on a machine with a GPU, in at most five minutes: tests/gpu/run.sh [WHEELS] [OUTPUT]
#
# WHEELS: a folder with wheels of distsolve, mpich, mpi4py, and of whatever else the Python there
# lacks; nothing is fetched. JAX with its plugin for the GPU is taken from that Python or the folder.
# OUTPUT: gets gpu-1.json, gpu-2.json for two ranks that share the GPU, and gpu-2-auto.json for the
# road that was found by trying.
set -u
here=$(cd "$(dirname "$0")" && pwd)
wheels=${1:-}
output=${2:-$here/../../build/gpu}
python=${PYTHON:-python3}
mkdir -p "$output"
output=$(cd "$output" && pwd)

if [ -n "$wheels" ]; then
  environment=$(mktemp -d)
  trap 'rm -rf "$environment"' EXIT
  "$python" -m venv --system-site-packages "$environment" || exit 1
  python=$environment/bin/python
  "$python" -m pip install -q --no-index --no-deps --no-compile "$wheels"/*.whl || exit 1
fi
mpiexec=$("$python" -c 'import os, sys; print(os.path.join(os.path.dirname(sys.executable), "mpiexec"))')
[ -x "$mpiexec" ] || mpiexec=mpiexec

export DISTSOLVE_GPU_MPI=${DISTSOLVE_GPU_MPI:-staged}
# From outside of the checkout, so that the installed package is what runs.
cd "$output" || exit 1
export XLA_PYTHON_CLIENT_PREALLOCATE=false
rm -f gpu-1.json gpu-2.json gpu-2-auto.json # those of an earlier run
failed=0
for ranks in 1 2; do
  echo "== $ranks rank(s)"
  export XLA_PYTHON_CLIENT_MEM_FRACTION=$([ "$ranks" = 1 ] && echo 0.8 || echo 0.4)
  timeout -k 5 105 "$mpiexec" -n "$ranks" "$python" "$here/on_gpu.py" \
    --output "$output/gpu-$ranks.json" ${REHEARSE:+--rehearse} || failed=1
done
# The road that the probe of MPI chooses, whatever the variable said above.
echo "== 2 ranks, DISTSOLVE_GPU_MPI=auto"
DISTSOLVE_GPU_MPI=auto timeout -k 5 50 "$mpiexec" -n 2 "$python" "$here/on_gpu.py" \
  --only reductions --output "$output/gpu-2-auto.json" ${REHEARSE:+--rehearse} || failed=1
exit $failed
