#!/bin/sh
# Make this network namespace as slow as a long line: what leaves its interfaces is delayed, and some of it is lost.
set -eu

: "${WAN_DELAY:=100ms}" "${WAN_JITTER:=20ms}" "${WAN_LOSS:=0.5%}" "${WAN_RATE:=100mbit}"

# All interfaces but the loopback are slow, since their order is not promised.
# 100,000 packets: netem's own 1,000 would drop most of a fast line's packets while they wait.
for interface in $(ip -o link show | sed -n 's/^[0-9]*: \([^:@]*\).*/\1/p'); do
  if [ "$interface" != lo ]; then
    tc qdisc replace dev "$interface" root netem limit 100000 \
      delay "$WAN_DELAY" "$WAN_JITTER" distribution normal loss "$WAN_LOSS" rate "$WAN_RATE"
    tc qdisc show dev "$interface"
  fi
done

# A rule lives as long as the namespace; this process stays so that `compose ps` shows it.
trap 'exit 0' TERM INT
while :; do
  sleep 3600 &
  wait $!
done
