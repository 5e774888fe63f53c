#!/usr/bin/env bash
# Install exact versions into a virtual environment: environment.sh DIRECTORY LOCK
#
# An environment of the same lock, Python and script is kept in ~/.cache/heterorl (XDG_CACHE_HOME): another checkout gets
# it in seconds, as links to the same files. Remove that folder at any time; the next call installs again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
directory=$1 lock=$2 python=${PYTHON:-python3}
here=$PWD/$directory
kept=${XDG_CACHE_HOME:-$HOME/.cache}/heterorl/environments/$(basename "$lock" .txt)
key=$( (cat "$lock" requirements/environment.sh; "$python" -VV; uname -m) | sha256sum | cut -c1-16)

# Links cost no space; where the checkout is on another disk than the cache, files are copied.
copy() { cp -al "$1" "$2" 2>/dev/null || { rm -rf "$2" && cp -a "$1" "$2"; }; }

rm -rf "$here"
if [ -d "$kept-$key" ]; then
  copy "$kept-$key" "$here"
  # Scripts and activation name the directory in which they were installed.
  grep -rlI --fixed-strings "$(cat "$here/origin")" "$here"/bin "$here/pyvenv.cfg" |
    xargs sed -i "s|$(cat "$here/origin")|$here|g"
  exit
fi
"$python" -m venv "$here"
pip=("$here/bin/pip" install --quiet --disable-pip-version-check --no-deps --no-compile)
"${pip[@]}" -r <(grep -v ^deepspeed "$lock")
# DeepSpeed's build imports torch.
if grep -q ^deepspeed "$lock"; then
  DS_BUILD_OPS=0 "${pip[@]}" --no-build-isolation -r <(grep ^deepspeed "$lock")
fi
# pip compiles on one core. What a test compiled first would show that test its warnings.
"$here/bin/python" -W ignore -m compileall -q -j 0 "$here/lib" >/dev/null || true
echo "$here" >"$here/origin"
mkdir -p "$(dirname "$kept")"
rm -rf "$kept"-*
copy "$here" "$kept-$key.part-$$"
mv -T "$kept-$key.part-$$" "$kept-$key"
