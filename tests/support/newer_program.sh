#!/usr/bin/env bash
# newer_program.sh SUITE PACKAGE PATH DIRECTORY: lay one program of another Debian into DIRECTORY, by apt's own signatures;
# nothing of it is installed. For programs that are too old in this machine's Debian and need no more than its C library.
set -euo pipefail
suite=$1 package=$2 path=$3 directory=$4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$directory"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $suite main" > "$work/sources"
cd "$work"
apt=(apt-get -qq -o Dir::Etc::SourceList="$work/sources" -o Dir::Etc::SourceParts=- -o Dir::State::Lists="$work/lists"
  -o Acquire::Languages=none -o APT::Sandbox::User=root)
"${apt[@]}" update
"${apt[@]}" download "$package"
dpkg -x "$package"_*.deb files
cd - > /dev/null
install -m 0755 "$work/files/$path" "$directory/"
