# SPDX-License-Identifier: Apache-2.0
# What ./quickstart and ./check share; sourced by both at the root of the repository.

# stage NAME COMMAND...: runs the command and says how long it took.
stage() {
  local name=$1 start=$SECONDS
  shift
  echo "== $name"
  "$@"
  echo "== $name: $((SECONDS - start)) s"
}

# missing_packages SECTION...: the packages of these sections of packages.txt that are not installed.
missing_packages() {
  local wanted
  wanted=$(awk -v sections=" $* " '/^\[/ { gsub(/[][]/, ""); on = index(sections, " " $0 " "); next }
                                   on && NF && !/^#/' packages.txt)
  local package
  for package in $wanted; do
    dpkg-query -W -f='${Status}\n' "$package" 2>/dev/null | grep -q '^install ok installed' || echo "$package"
  done
}

# install_packages ASK SECTION...: installs what is missing; ASK is "yes" when nobody needs to be asked. Uses no
# network when nothing is missing.
install_packages() {
  local yes=$1
  shift
  if ! command -v dpkg-query >/dev/null; then
    echo "This is no Debian: the packages of packages.txt are expected to be there." >&2
    return
  fi
  local missing
  mapfile -t missing < <(missing_packages "$@")
  [ ${#missing[@]} -gt 0 ] || return 0
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "These packages are missing, and there is no sudo; as root, run:
  apt-get install ${missing[*]}" >&2; exit 1; }
    as_root=(sudo)
    if [ "$yes" != yes ]; then
      [ -t 0 ] || { echo "Missing: ${missing[*]}. Run again with --yes to install them with sudo." >&2; exit 1; }
      local answer
      read -r -p "Install with sudo: ${missing[*]}? [y/N] " answer
      [[ $answer == [yY]* ]] || exit 1
    fi
  fi
  echo "Installing ${missing[*]}"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq update
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends \
    "${missing[@]}" >/dev/null
}

# build TARGET...: configures and builds the release preset on all cores.
build() {
  cmake --preset release -Wno-dev >/dev/null
  cmake --build --preset release --parallel "$(nproc)" --target "$@"
}
