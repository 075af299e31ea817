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

# python_for_tests: a virtual environment with python/requirements-check.txt in build/python-venv, and the Python module part
# of the build from then on (cmake_flags). Where PyPI cannot be had, a remark, and the build goes without the module.
python_for_tests() {
  local venv=build/python-venv wanted=python/requirements-check.txt
  cmake_flags=(-DLODESTONE_PYTHON=OFF)
  if ! cmp -s "$wanted" "$venv/has.txt"; then
    if ! { python3 -m venv --clear "$venv" && "$venv/bin/pip" install -q --only-binary :all: --retries 2 --timeout 20 \
        --disable-pip-version-check -r "$wanted"; } 2>build/python-venv.log; then
      echo "The Python module is neither built nor tested, since its tools could not be installed from PyPI: build/python-venv.log"
      return 0
    fi
    cp "$wanted" "$venv/has.txt"
  fi
  cmake_flags=(-DLODESTONE_PYTHON=ON "-DPython_EXECUTABLE=$PWD/$venv/bin/python")
}

# What makes a build from scratch faster: ccache where it is installed, else precompiled headers, which ccache cannot share between
# folders.
if command -v ccache >/dev/null; then
  fast_flags=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
  export CCACHE_BASEDIR=$PWD  # what one clone has compiled serves another
else
  fast_flags=(-DLODESTONE_PCH=ON)
fi

# build TARGET...: configures (with cmake_flags) and builds the release preset on all cores.
cmake_flags=()
build() {
  cmake --preset release -Wno-dev "${fast_flags[@]}" "${cmake_flags[@]}" >/dev/null
  cmake --build --preset release --parallel "$(nproc)" --target "$@"
}
