#!/bin/bash
# Coordinator, learner and one site on this machine; ends when the learner has taken its steps. Goes on where it ended.
#   examples/run.sh NAME [MAX_STEPS]     NAME: smollm2-sums, code-sandbox or guess, after its prepare.py
set -euo pipefail
here=$(dirname "$0")/${1:?the name of an example}
out=runs/$1
mkdir -p "$out"
heterorl coordinator --config "$here/coordinator.toml" >>"$out/coordinator.log" 2>&1 &
coordinator=$!
heterorl sampler --config "$here/sampler.toml" >>"$out/sampler.log" 2>&1 &
sampler=$!
trap 'kill $sampler $coordinator 2>/dev/null || true; wait' EXIT INT TERM
heterorl learner --config "$here/learner.toml" ${2:+--set "max_steps=$2"} 2>&1 | tee -a "$out/learner.log"
kill $sampler $coordinator 2>/dev/null || true
wait
trap - EXIT INT TERM
heterorl report "$out" --out "$out/report.html" --pictures "$out/pictures"
