#!/usr/bin/env bash
# Everything that a GPU machine has to show, in one go: the `gpu` tests, the demo job from disk, the benchmarks.
# Logs go to the folder named by the first argument. The package need not be installed; its dependencies must be.
# Most tests run in eight processes a GPU (pytest-xdist), 1,500 of them in three minutes on two H100.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-out/gpu}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

status=0
num_gpus=$(nvidia-smi --list-gpus | wc -l)
quiet=(-q -p no:cacheprovider --durations=5 --tb=short)
python3 -m pytest "${quiet[@]}" -m "gpu and not alone" -n $((8 * num_gpus)) --dist worksteal tests 2>&1 |
    tee "$out/tests.log" | tail -n 40 || status=1
python3 -m pytest "${quiet[@]}" -m "gpu and alone" tests 2>&1 | tee "$out/alone.log" | tail -n 40 || status=1
python3 -m zinfer run --model examples/demo/model --input examples/demo/prompts.jsonl --output "$out/demo.jsonl" \
    --config examples/demo/config.json --device cuda --max-new-tokens 8 --restart 2>&1 | tee "$out/demo.log" || status=1
python3 scripts/check_demo.py "$out/demo.jsonl" | tee -a "$out/demo.log" || status=1
for name in stream load disk quantized kernels experts attention job peers; do
    python3 "benchmarks/$name.py" --out "$out/$name.json" 2>&1 | tee "$out/$name.log" || status=1
done
exit "$status"
