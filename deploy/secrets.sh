#!/usr/bin/env bash
# Put certificates and Grafana's password where compose.yaml looks for them, owned by who reads them. Run as root.
set -euo pipefail

usage="usage: deploy/secrets.sh CERTS

CERTS is a directory as 'heterorl certs' makes it, or a copy of it without ca.key. Files of an earlier call are
replaced, also by renewed certificates. Writes to HETERORL_SECRETS_DIR, of the environment or of .env in this script's
directory, by default 'secrets' there."

fail() {
  printf 'secrets.sh: %s\n' "$1" >&2
  exit 2
}

(($# == 1)) || fail "$usage"
[[ $1 != -h && $1 != --help ]] || {
  printf '%s\n' "$usage"
  exit 0
}
certs=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# As Compose reads it: sudo keeps no variables, and a relative path counts from this directory.
if [[ ! ${HETERORL_SECRETS_DIR:-} && -e $here/.env ]]; then
  HETERORL_SECRETS_DIR=$(sed -nE "s/^HETERORL_SECRETS_DIR=([\"']?)(.*)\\1$/\\2/p" "$here/.env" | tail -n 1)
fi
secrets=${HETERORL_SECRETS_DIR:-secrets}
if [[ $secrets != /* ]]; then secrets=$here/$secrets; fi
nodes=(coordinator-main:coordinator learner-learner:learner sampler-site-1:sampler-1 sampler-site-2:sampler-2)

# All or nothing: what is missing is said before anything is written.
missing=()
for node in "${nodes[@]}"; do
  for file in ca.crt node.crt node.key; do
    [[ -r $certs/${node%:*}/$file ]] || missing+=("$certs/${node%:*}/$file")
  done
done
((${#missing[@]} == 0)) || fail "cannot read ${missing[*]}: \`heterorl certs issue\` makes them, deploy/README.md says how"
[[ ${HETERORL_SECRETS_OWNERS:-yes} == no || $EUID -eq 0 ]] ||
  fail "run as root: containers run as user 10001 and Grafana as 472, and they alone may read these files"

# A file has its owner before its name: a container never reads a part of it.
owned() { [[ ${HETERORL_SECRETS_OWNERS:-yes} == no ]] || printf '%s\n' -o "$1" -g "$1"; }

umask 077
mkdir -p "$secrets"
# The files inside belong to others, who must be able to go through.
chmod 0711 "$secrets"
for node in "${nodes[@]}"; do
  target=$secrets/${node#*:}
  mapfile -t owner < <(owned 10001)
  install -d -m 0700 "${owner[@]}" "$target"
  for file in ca.crt node.key node.crt; do
    install -m 0400 "${owner[@]}" "$certs/${node%:*}/$file" "$target/.new"
    mv -f "$target/.new" "$target/$file"
  done
done
if [[ ! -e $secrets/grafana_admin_password ]]; then
  mapfile -t owner < <(owned 472)
  head -c 24 /dev/urandom | base64 | install -m 0600 "${owner[@]}" /dev/stdin "$secrets/grafana_admin_password"
fi
printf 'written: %s; the password of Grafana'\''s user admin is in grafana_admin_password\n' "$secrets"
