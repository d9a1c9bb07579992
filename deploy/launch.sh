#!/bin/sh
# A launch script to start from: everything that a run depends on is said here, once, so that the
# same command repeats the run and, after a crash, resumes it. Change a value in the environment:
#
#   SEED=7 DATA=/data/text PRECISION=bf16 LOG_DIR=/var/log/training sh deploy/launch.sh
#
# In the place of deploy.demo.train put your own trainer.
set -eu
cd "$(dirname "$0")/.."

: "${PYTHON:=python}"
# Of weights, dropout and the order of the data; a resumed run goes on with the saved states.
: "${SEED:=1}"
# A folder with the text to train on. The same path and split on each start, or a rollback replays
# other data than it skipped. Empty: the text of Python's standard library.
: "${DATA:=}"
# fp32, bf16 or fp16 (with a gradient scaler). Activations beyond 65,504 do not fit into fp16.
: "${PRECISION:=fp32}"
# Run folders with checkpoints and control files, and the log. Only user and group may read them.
: "${LOG_DIR:=runs}"
# Must survive restarts: the rollback budget and the incidents hang on it.
: "${ACT_RUN:=gpt-demo}"
# Where Prometheus finds the metrics.
: "${ACT_PORT:=9460}"
: "${STEPS:=2000}"
# 1 makes torch say more when it fails, and costs time.
: "${DEBUG:=0}"

export ACT_PORT
umask 027
mkdir -p "$LOG_DIR"
if [ "$DEBUG" = 1 ]; then
    export TORCH_SHOW_CPP_STACKTRACES=1 PYTHONFAULTHANDLER=1 ACT_LOG_LEVEL=DEBUG
fi

log=$LOG_DIR/$ACT_RUN.log
echo "Run $ACT_RUN: seed $SEED, $PRECISION, log in $log"
exec "$PYTHON" -m deploy.demo.train --run "$ACT_RUN" --seed "$SEED" ${DATA:+--data "$DATA"} \
    --precision "$PRECISION" --log-dir "$LOG_DIR" --steps "$STEPS" "$@" >>"$log" 2>&1
