#!/usr/bin/env bash
# Checks and measures everything that needs a CUDA device, in under 8 minutes. Needs torch, triton, numpy, safetensors
# and pytest; not an installed Twinpool.
#
#   bench/gpu.sh             the tests of the GPU's kernels and engine, then speed beside the device's own limits
#   bench/gpu.sh --dry-run   the same lines at tiny sizes on a CPU, to see that they run
#
# Results go to $OUT (default: gpu-results): tests.txt, and a table and JSON for each model. $PYTHON is the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-gpu-results}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=src:tests HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$OUT"

dry_run=""
case "${1-}" in
"") ;;
--dry-run) dry_run=$1 ;;
*) echo "usage: bench/gpu.sh [--dry-run]" >&2 && exit 2 ;;
esac

has() { "$PYTHON" -c "import $1" 2>/dev/null; }

if [ -n "$dry_run" ]; then
	export TWINPOOL_GPU_REHEARSAL=1
	echo "rehearsal on a CPU: figures mean nothing; what it shows is that every line runs" >"$OUT/device.txt"
else
	"$PYTHON" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"
p = torch.cuda.get_device_properties(0)
print(f"{p.name}: {p.total_memory / 2**30:.0f} GiB, {p.multi_processor_count} SMs, sm_{p.major}{p.minor}, "
      f"torch {torch.__version__}, CUDA {torch.version.cuda}")' >"$OUT/device.txt"
fi
cat "$OUT/device.txt"

failed=0
files=(tests/gpu)
if [ -z "$dry_run" ]; then # without a GPU the ordinary tests run these, in Triton's interpreter
	for file in tests/unit/test_gpu_{attention,kernels,sampling}.py; do
		if grep -q hypothesis "$file" && ! has hypothesis; then
			echo "left out: $file needs the package hypothesis" | tee -a "$OUT/device.txt"
		else
			files+=("$file")
		fi
	done
fi
if has pytest; then
	timeout 240 "$PYTHON" -m pytest -c tests/gpu/alone.ini --rootdir tests/gpu -q -rs --durations 5 "${files[@]}" 2>&1 |
		tee "$OUT/tests.txt" || failed=1
else
	echo "the tests need pytest: $PYTHON -m pip install pytest" | tee "$OUT/tests.txt"
	failed=1
fi

timeout 220 "$PYTHON" -m twinpool.bench.engine.gpu --out "$OUT" $dry_run || failed=1
echo "results: $OUT"
exit $failed
