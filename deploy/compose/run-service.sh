#!/bin/sh
# Runs one service on the container's own address: `run-service worker --model ...`.
set -eu
service=$1
shift
exec python -m "services.$service" --instance "$service-$(hostname)" \
  --listen 0.0.0.0:7600 --metrics-listen 0.0.0.0:9100 --advertise-host "$(hostname -i | cut -d' ' -f1)" "$@"
