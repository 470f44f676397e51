#!/usr/bin/env bash
# What a container starts with: the self test, then the command in its place.
# MEGATRON_FP8_SELF_TEST: require (a fault ends the container; the default), warn (it is only told), skip.
# MEGATRON_FP8_RUN_ROOT: the directory of the runs that the self test looks at; runs in the working directory without it.
# MEGATRON_FP8_MIN_GPUS: fewer GPUs are a fault; 1 in the GPU image, which would else train on the CPU stand-in.
set -euo pipefail

self_test() {
    python -m megatron_fp8.doctor --run-root "${MEGATRON_FP8_RUN_ROOT:-runs}" \
        --min-gpus "${MEGATRON_FP8_MIN_GPUS:-0}" >&2
}

case "${MEGATRON_FP8_SELF_TEST:-require}" in
require) self_test ;;
warn) self_test || echo "entrypoint: the self test found a fault; going on because of MEGATRON_FP8_SELF_TEST=warn" >&2 ;;
skip) ;;
*)
    echo "entrypoint: MEGATRON_FP8_SELF_TEST=$MEGATRON_FP8_SELF_TEST is none of require, warn, skip" >&2
    exit 2
    ;;
esac
exec "$@"
