#!/usr/bin/env bash
# docker compose, for the files in this script's directory; refuses a Compose that is too old for them.
set -euo pipefail

least=2.20.2 # the oldest version that these files are tried with
directory=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() {
  printf 'compose.sh: %s\n' "$1" >&2
  exit 2
}

is_enough() {
  [[ $1 =~ ^[0-9]+(\.[0-9]+)+ ]] && [[ $(printf '%s\n%s\n' "$least" "${BASH_REMATCH[0]}" | sort -V | head -n 1) == "$least" ]]
}

found=""
for program in "docker compose" docker-compose; do
  read -ra words <<<"$program"
  version=$("${words[@]}" version --short 2>/dev/null || true)
  version=${version#v}
  if is_enough "$version"; then
    cd "$directory"
    exec "${words[@]}" "$@"
  fi
  if [[ $version =~ ^[0-9] ]]; then found+=" $program is $version;"; fi
done
fail "these files need Docker Compose $least or newer:${found:- there is none;} install Docker's own package \
docker-compose-plugin (https://docs.docker.com/compose/install/linux/), not the distribution's docker-compose 1.29"
