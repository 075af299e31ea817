# SPDX-License-Identifier: Apache-2.0
# Every dependency is a Debian package (packages.txt).
find_package(Threads REQUIRED)
find_package(dnnl REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(fmt REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(pcre2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET libxxhash)
pkg_check_modules(utf8proc REQUIRED IMPORTED_TARGET libutf8proc)

# JSON is headers alone: who links the installed library does not need it.
set(lode_dependencies Threads::Threads DNNL::dnnl fmt::fmt PkgConfig::pcre2 PkgConfig::xxhash PkgConfig::utf8proc
  $<BUILD_INTERFACE:nlohmann_json::nlohmann_json>)
