#!/usr/bin/env bash
# Install heterorl's services on a machine with systemd; repeat it to upgrade. See deploy/README.md.
set -euo pipefail
# The services' users must enter the environments.
umask 022

usage() {
  cat <<'TEXT'
usage: deploy/install.sh [--dry-run] [--destdir DIR] [--with REQUIREMENT]... [--nproc N] ROLE...

ROLE is one of these. NAME names /etc/heterorl/NAME.toml and the instance of the unit.

  coordinator             one a run; no GPU
  learner:NAME            PyTorch in one process
  learner-deepspeed:NAME  DeepSpeed, a process for each GPU
  sampler:NAME            transformers
  sampler-vllm:NAME       vLLM, which is fast on a GPU; has a separate environment
  relay:NAME              at a site with several samplers; no GPU

  --dry-run        print what would be done, change nothing
  --destdir DIR    put the files under DIR only: no user, no environment (it could not be moved), no word to systemd
  --with REQUIREMENT   install this too, as pip understands it: a package or directory with your reward, or a file of
                   requirements as -rFILE; name it again in every later call
  --nproc N        processes of a new learner-deepspeed, by default one for each NVIDIA GPU that is seen; it is written
                   to /etc/heterorl/NAME.env, which is never overwritten
  PYTHON           the interpreter to build environments with (environment variable, default python3)

A second run with the same sources changes nothing. A role keeps its packages when a later call names another one;
configuration files that are there are never overwritten.
TEXT
}

fail() {
  printf 'install.sh: %s\n' "$1" >&2
  exit 2
}

source_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
dry_run=false destdir="" nproc=""
roles=() with=()

while (($#)); do
  case $1 in
    --dry-run) dry_run=true ;;
    --destdir)
      (($# > 1)) || fail "--destdir needs a directory"
      destdir=${2%/}
      shift
      ;;
    --with)
      (($# > 1)) || fail "--with needs a requirement"
      # pip and the digest run in other directories. As for pip, a package's path has a slash or begins with a dot.
      extra=$2 option="" is_path=false
      if [[ $extra == -r?* ]]; then option=-r extra=${extra#-r} is_path=true; fi
      place=${extra%%\[*}
      if [[ $place == */* || $place == .* ]]; then is_path=true; fi
      if $is_path && [[ -e $place ]]; then extra=$(realpath "$place")${extra#"$place"}; fi
      with+=("$option$extra")
      shift
      ;;
    --nproc)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || fail "--nproc needs a number of processes"
      nproc=$2
      shift
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    coordinator | learner:* | learner-deepspeed:* | sampler:* | sampler-vllm:* | relay:*) roles+=("$1") ;;
    *) fail "unknown argument '$1'; --help shows the usage" ;;
  esac
  shift
done
((${#roles[@]})) || fail "name at least one role: coordinator, learner:NAME, learner-deepspeed:NAME, sampler:NAME, sampler-vllm:NAME or relay:NAME"

# Instance names become paths and unit names: the characters that need no escaping in either.
names=()
for role in "${roles[@]}"; do
  name=${role#*:}
  [[ $name =~ ^[A-Za-z0-9_][A-Za-z0-9_.]*(-+[A-Za-z0-9_.]+)*$ ]] || fail "'$name' is not a name of letters, digits, '_', '.', '-'"
  [[ $role == coordinator || $name != coordinator ]] || fail "the name 'coordinator' is the coordinator's"
  for known in "${names[@]}"; do
    [[ $known != "$name" ]] || fail "two roles are named '$name'; every instance needs a name of its own"
  done
  names+=("$name")
done
if ! $dry_run && [[ -z $destdir && $EUID -ne 0 ]]; then
  fail "run as root, or with --dry-run or --destdir"
fi

run() {
  if $dry_run; then
    printf '+'
    printf ' %q' "$@"
    printf '\n'
  else
    "$@"
  fi
}

# Files belong to root and are read by the service; only its state belongs to it.
directory() {
  if [[ ! -d $destdir$2 ]]; then run install -d -m "$1" "$destdir$2"; fi
}
file() {
  if ! cmp -s "$2" "$destdir$3"; then run install -D -m "$1" "$2" "$destdir$3"; fi
}

make_user() {
  [[ -z $destdir ]] || return 0
  if ! getent passwd heterorl >/dev/null; then
    run useradd --system --user-group --home-dir /var/lib/heterorl --no-create-home --shell /usr/sbin/nologin heterorl
  fi
}

# One environment per content: an upgrade is a new directory and one rename, a rollback is the same rename back.
digest_of_sources() {
  local kinds=("$@")
  (cd "$source_dir" &&
    { find services requirements -type f -not -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum &&
      sha256sum pyproject.toml && printf '%s\n' "${kinds[@]}" "${with[@]}" && digest_of_extras; }) | sha256sum | cut -c1-12
}

# A package of your own that changed is another environment: the directories among the extras, by content.
digest_of_extras() {
  local extra
  for extra in "${with[@]}"; do
    extra=${extra#-r} extra=${extra%%\[*}
    if [[ $extra == /* && -e $extra ]]; then find "$extra" -type f -not -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum; fi
  done
}

# The kinds of roles that an environment was made for.
kinds_of() {
  local path kind
  for path in "$1"/share/heterorl/requirements/*.txt; do
    kind=$(basename "$path" .txt)
    if [[ -e $source_dir/requirements/$kind.txt ]]; then printf '%s\n' "$kind"; fi
  done
}

# make_environment LINK KIND...: what these kinds of roles and the kinds of earlier calls need.
make_environment() {
  local link=/opt/heterorl/$1 kinds target
  mapfile -t kinds < <({ printf '%s\n' "${@:2}" && kinds_of "$link"; } | LC_ALL=C sort -u)
  target=/opt/heterorl/$(digest_of_sources "${kinds[@]}")
  if [[ ! -e $target/complete ]]; then
    local files=() requirements=() kind
    for kind in "${kinds[@]}"; do
      files+=("$source_dir/requirements/$kind.txt")
      requirements+=(-r "${files[-1]}")
    done
    run rm -rf "$target"
    run "$python" -m venv "$target"
    # DeepSpeed comes as source; its own kernels, which would take CUDA's compiler, are not used.
    run env DS_BUILD_OPS=0 "$target/bin/pip" install --quiet --disable-pip-version-check "${requirements[@]}"
    run "$target/bin/pip" install --quiet --disable-pip-version-check --no-deps "$source_dir"
    if ((${#with[@]})); then run "$target/bin/pip" install --quiet --disable-pip-version-check "${with[@]}"; fi
    run install -D -m 0644 "$source_dir/deploy/README.md" "$target/share/heterorl/README.md"
    run install -D -m 0644 -t "$target/share/heterorl/requirements" "${files[@]}"
    run touch "$target/complete"
  fi
  if [[ $(readlink "$link" 2>/dev/null || true) != "$target" ]]; then
    run ln -sfn "$target" /opt/heterorl/.next
    run mv -T /opt/heterorl/.next "$link"
  fi
}

# vLLM pins other versions than the lock of the services: its sampler shares no environment with another role.
link_of() {
  if [[ $1 == sampler-vllm ]]; then printf 'current-vllm'; else printf 'current'; fi
}
unit_of() {
  case $1 in
    coordinator) printf 'heterorl-coordinator.service' ;;
    learner | learner-deepspeed) printf 'heterorl-learner@.service' ;;
    *) printf 'heterorl-%s@.service' "$1" ;;
  esac
}

# A process for each GPU, unless somebody said or says otherwise.
write_nproc() {
  local path=/etc/heterorl/$1.env count=$nproc
  if [[ -e $destdir$path ]]; then return 0; fi
  if [[ -z $count ]]; then
    count=$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' | wc -l)
    if ((count == 0)); then count=1; fi
  fi
  local text
  text=$(mktemp)
  printf 'HETERORL_NPROC=%s\n' "$count" >"$text"
  # It may get HF_TOKEN; systemd reads it as root.
  file 0600 "$text" "$path"
  rm -f "$text"
}

# A relay needs what a coordinator needs.
mapfile -t kinds < <(printf '%s\n' "${roles[@]%%:*}" | sed 's/^relay$/coordinator/' | LC_ALL=C sort -u)
make_user
directory 0755 /opt/heterorl
directory 0755 /etc/heterorl
directory 0700 /etc/heterorl/credentials
if [[ -z $destdir ]]; then
  for link in current current-vllm; do
    own=()
    for kind in "${kinds[@]}"; do
      if [[ $(link_of "$kind") == "$link" ]]; then own+=("$kind"); fi
    done
    if ((${#own[@]})); then make_environment "$link" "${own[@]}"; fi
  done
fi
for role in "${roles[@]}"; do
  kind=${role%%:*} name=${role#*:}
  directory 0700 "/etc/heterorl/credentials/$name"
  if [[ ! -e $destdir/etc/heterorl/$name.toml ]]; then
    file 0644 "$source_dir/deploy/config/$kind.toml" "/etc/heterorl/$name.toml"
  fi
  if [[ ($kind == coordinator || $kind == relay) && ! -e $destdir/etc/heterorl/revoked ]]; then
    file 0644 "$source_dir/deploy/config/revoked" /etc/heterorl/revoked
  fi
  if [[ $kind == learner-deepspeed ]]; then write_nproc "$name"; fi
  unit=$(unit_of "$kind")
  text=$source_dir/services/launch/units/$unit
  if [[ $kind == sampler-vllm ]]; then
    # The unit of a sampler, in its own environment.
    text=$(mktemp)
    sed "s#/current/#/$(link_of "$kind")/#" "$source_dir/services/launch/units/${unit/-vllm/}" >"$text"
  fi
  file 0644 "$text" "/etc/systemd/system/$unit"
done
if [[ -z $destdir ]]; then run systemctl daemon-reload; fi

if $dry_run; then exit 0; fi
printf 'Installed. Nothing was started or restarted.\n'
for role in "${roles[@]}"; do
  kind=${role%%:*} name=${role#*:}
  unit=$(unit_of "$kind")
  unit=${unit%.service}
  if [[ $unit == *@ ]]; then unit+=$name; fi
  printf '  edit /etc/heterorl/%s.toml, put ca.crt, node.crt and node.key into /etc/heterorl/credentials/%s, then:\n' "$name" "$name"
  printf '    systemctl enable --now %s (or: systemctl restart %s)\n' "$unit" "$unit"
done
